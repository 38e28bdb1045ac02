"""A run says how its stage fares, and never RUNNING for something that is dead."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_clone import FakeClone
from mlflow.entities import RunInfo

from pipelines.ledger.entry import Entry
from pipelines.tracking.cursor import end_invocation, unshipped


@pytest.mark.parametrize(
    ("ending", "status"), [("failed", "FAILED"), ("cancelled", "KILLED"), ("died", "FAILED")]
)
def test_what_does_not_end_well_says_so_up_to_the_invocation(
    clone: FakeClone, ending: str, status: str
) -> None:
    clone.run("sft")
    entry = clone.begin("rollout@iter_001", steps=1)
    clone.sync()
    assert clone.run_of("rollout@iter_001").info.status == "RUNNING"
    assert clone.parent().info.status == "RUNNING"
    if ending == "died":
        clone.die(entry)
    else:
        clone.end(entry, ending, error="no luck")
    clone.sync()
    found = {run.info.run_name: run.info.status for run in clone.runs()}
    assert found == {
        "sft": "FINISHED",
        "rollout@iter_001": status,
        "iter_001": status,
        "grpo · verifier · brave-owl · dvc repro": status,
    }
    assert all(run.info.end_time for run in clone.runs())


def test_a_job_that_died_unseen_is_corrected_by_the_next_command(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=1)
    clone.sync()
    clone.die(entry)
    assert clone.run_of("sft").info.status == "RUNNING"
    clone.sync()
    assert clone.run_of("sft").info.status == "FAILED"
    assert clone.parent().info.status == "FAILED"


def test_the_invocation_runs_as_long_as_its_command(clone: FakeClone) -> None:
    command = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    clone.run("sft", pid=command.pid)
    clone.sync()
    assert clone.run_of("sft").info.status == "FINISHED"
    assert clone.parent().info.status == "RUNNING"
    command.communicate(b"\n")
    clone.sync()
    assert clone.parent().info.status == "FINISHED"


def test_a_command_may_close_its_own_invocation(clone: FakeClone) -> None:
    clone.run("sft", pid=os.getpid())
    clone.sync()
    assert clone.parent().info.status == "RUNNING"
    end_invocation(clone.repository, "run")
    clone.sync()
    assert clone.parent().info.status == "FINISHED"


def test_a_stage_that_waits_its_turn_reopens_the_iteration(clone: FakeClone) -> None:
    clone.run("rollout@iter_001")
    clone.sync()
    entry = clone.begin("score@iter_001")
    clone.sync()
    assert clone.parent().info.status == "RUNNING"
    clone.finish(entry)
    clone.sync()
    assert {run.info.status for run in clone.runs()} == {"FINISHED"}


def test_an_iteration_whose_stages_another_command_took_over_was_killed(clone: FakeClone) -> None:
    clone.run("sft")
    _, found = taken_over(clone)
    assert found["run/iter_001"].status == "KILLED"
    assert found["run/iter_001"].end_time
    assert found["run"].status == "FINISHED"
    assert found["run-again/iter_001"].status == "RUNNING"


def test_a_command_whose_stages_another_one_took_over_was_killed(clone: FakeClone) -> None:
    entry, found = taken_over(clone)
    for group in ("run", "run/iter_001"):
        assert found[group].status == "KILLED"
        assert found[group].end_time
    assert found["run-again"].status == "RUNNING"
    clone.finish(entry)
    clone.sync()
    assert clone.run_of("rollout@iter_001").info.status == "FINISHED"


def taken_over(clone: FakeClone) -> tuple[Entry, dict[str, RunInfo]]:
    """A stage that died and that the next command took up before anybody looked; runs by group."""
    entry = clone.begin("rollout@iter_001", steps=1)
    clone.sync()
    clone.die(entry)
    clone.start(entry, steps=1, invocation="run-again")
    clone.sync()
    return entry, {run.data.tags.get("lockstep.group"): run.info for run in clone.runs()}


def test_a_run_that_somebody_deleted_stays_away_and_holds_up_nothing(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=2)
    clone.sync()
    clone.client.delete_run(clone.run_of("sft").info.run_id)
    clone.finish(entry)
    clone.run("reward_model")
    clone.sync()
    assert clone.run_of("reward_model").info.status == "FINISHED"
    assert clone.runs("tags.`lockstep.address` = 'sft'") == []
    assert unshipped(clone.repository) == []
    assert clone.cursor(entry)["problem"]


def test_runs_that_went_away_with_their_database_are_made_again(
    clone: FakeClone, migrated_database: Path
) -> None:
    entry = clone.begin("sft", steps=2)
    clone.sync()
    shutil.copy(migrated_database, clone.repository.home / "mlflow.db")
    clone.finish(entry)
    tracker = clone.tracker()
    while unshipped(clone.repository):
        assert tracker.sync() is None
    assert clone.run_of("sft").info.status == "FINISHED"
    assert clone.steps(clone.run_of("sft"), "step/loss") == [1, 2]
    assert clone.parent().info.status == "FINISHED"
