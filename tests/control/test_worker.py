"""What a job's process writes down about itself, whenever and however often Slurm starts it."""

import subprocess
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from pipelines.base import atomic
from pipelines.base.locks import hold_lock
from pipelines.config.profiles import Resources
from pipelines.driver.activity import activity
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.environments import note_environment
from pipelines.ledger.publish import publish
from pipelines.ledger.state import State
from pipelines.ledger.task import Task
from pipelines.slurm.restarts import stop_or_requeue
from pipelines.worker.worker import CODE, run_attempt
from stages.context import StageError
from stages.progress import Pace
from tests.control.made_up import SPEC, write_outputs
from tests.ledger_values import ORIGIN, SLURM, launch, result, worker
from tests.waiting import TIMEOUT_S

MADE_BY = {"host": "node1", "cpu": "A"}
REPORT = replace(SPEC, stage="report", name="report")


@pytest.fixture
def done(entry: Entry) -> Entry:
    """A stage whose outputs are complete."""
    write_outputs(entry)
    return entry


def start(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, restart: int = 0) -> str:
    """As srun starts the job's only process."""
    variables = {"PROCID": 0, "NTASKS": 1, "LOCALID": 0, "JOB_ID": 70, "RESTART_COUNT": restart}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return run_attempt(str(attempt.folder))


def new_attempt(entry: Entry) -> Attempt:
    return entry.new_attempt(launch(SLURM))


def test_a_finished_job_that_slurm_starts_again_keeps_its_record(
    done: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(done)
    me = worker(host="node1", environment=MADE_BY)
    end = result(outs={"artifacts/model": "m.dir"}, metrics={"loss": 1}, environment=MADE_BY)
    attempt.write(me)
    attempt.write(end)
    assert start(attempt, monkeypatch, restart=1) == "completed"
    assert (attempt.worker, attempt.result) == (me, end)
    assert attempt.restarts == 1
    record = publish(tmp_path, done)
    assert (record.outs, record.metrics) == (end.outs, end.metrics)
    assert (record.started, record.ended, record.environment) == (1.0, 2.0, MADE_BY)


@pytest.mark.parametrize("dead_before_its_word", [False, True])
def test_an_attempt_that_finds_all_done_says_nothing_about_who_made_it(
    done: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_before_its_word: bool
) -> None:
    made = new_attempt(done)
    made.write(worker(environment=MADE_BY))
    if not dead_before_its_word:
        made.write(result(outs={"artifacts/model": "m.dir"}, environment=MADE_BY))
    again = new_attempt(done)
    assert start(again, monkeypatch) == "completed"
    record = publish(tmp_path, done)
    assert (record.environment, record.started) == (MADE_BY, 1.0)
    assert record.started < record.ended
    assert record.attempts == 2


def test_the_record_names_every_kind_of_machine_that_had_a_hand_in_it(
    done: Entry, tmp_path: Path
) -> None:
    first, second = new_attempt(done), new_attempt(done)
    note_environment(first, Task(), {"host": "node1", "cpu": "A"})
    note_environment(first, Task(restart=1), {"host": "node2", "cpu": "A"})
    note_environment(first, Task(restart=2), {"host": "node3", "cpu": "B"})
    note_environment(second, Task(), {"host": "node4", "cpu": "B"})
    made_by = {"host": "node4", "cpu": "B"}
    second.write(worker(environment=made_by))
    record = publish(tmp_path, done)
    assert record.environment == made_by
    assert record.earlier_environments == ({"host": "node1", "cpu": "A"},)


def test_one_kind_of_machine_is_named_once(done: Entry, tmp_path: Path) -> None:
    attempt = new_attempt(done)
    for restart, host in enumerate(("node1", "node2")):
        note_environment(attempt, Task(restart=restart), {**MADE_BY, "host": host})
    attempt.write(worker(environment=MADE_BY))
    assert publish(tmp_path, done).earlier_environments == ()


def test_each_start_of_a_job_notes_its_machine(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is gone, so each ends before it has begun to compute."""
    entry = ledger.find_or_create(REPORT, ORIGIN)
    resources = Resources(deterministic=False)
    attempt = entry.new_attempt(launch(SLURM, root=tmp_path, code=CODE, resources=resources))
    for restart in range(2):
        assert start(attempt, monkeypatch, restart) == "failed"
    end = attempt.result
    assert end is not None
    assert "is gone since the stage was submitted" in str(end.error)
    notes = sorted((attempt.folder / "environments").iterdir())
    assert [path.name for path in notes] == ["000.00000.json", "001.00000.json"]
    assert [atomic.load_json(path) for path in notes] == [end.environment] * 2


def test_what_other_programs_of_a_stage_print_is_redacted(
    ledger: Ledger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In place of a stage, which needs inputs: what a job does first."""

    def leak(*_: object) -> None:
        subprocess.run("echo mine is $MY_API_KEY; echo $MY_API_KEY >&2", shell=True, check=True)
        raise StageError("enough")

    monkeypatch.setenv("MY_API_KEY", "nobody's business")
    monkeypatch.setattr("pipelines.worker.worker.check_inputs", leak)
    attempt = ledger.find_or_create(REPORT, ORIGIN).new_attempt(launch(root=tmp_path, code=CODE))
    assert run_attempt(str(attempt.folder)) == "failed"
    written = capfd.readouterr()
    assert "mine is ***\n" in written.out
    assert "***\n" in written.err


def test_two_attempts_at_a_stage_do_not_work_at_once(
    done: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, ended = new_attempt(done), list[str]()
    second = Thread(target=lambda: ended.append(start(attempt, monkeypatch)))
    with hold_lock(done.folder / "working.00000"):
        second.start()
        second.join(0.5)
        assert not attempt.tasks, "it says nothing before the other one has ended"
    second.join(TIMEOUT_S)
    assert ended == ["completed"]
    assert [task.state for task in attempt.tasks] == ["completed"]


def test_a_cancelled_job_that_slurm_brings_back_computes_nothing(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(entry)
    attempt.mark_cancelled()
    assert start(attempt, monkeypatch, restart=1) == "cancelled"
    assert attempt.result is not None
    assert attempt.result.error == "cancelled before it began"


def test_how_far_an_earlier_start_was_is_forgotten(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(entry)
    attempt.mark_cancelled()  # so that it ends as soon as it has started
    atomic.write_json(entry.folder / "progress.json", Pace().report(274, 376, "steps", {}))
    assert activity(entry, State.RUNNING) == "steps 274/376"
    start(attempt, monkeypatch, restart=1)
    assert activity(entry, State.RUNNING) == "starting"


def test_a_job_that_is_told_to_stop_asks_for_as_many_restarts_as_its_profile_allows(
    entry: Entry,
) -> None:
    resources = Resources(requeues=2, time_minutes=30)
    attempt = entry.new_attempt(launch(SLURM, resources=resources, restarts_before=1))
    ends = [stop_or_requeue(attempt, Task(job="7", restart=n)) for n in (0, 1)]
    assert [end.state for end in ends] == ["stopped", "failed"]
    assert "allows no more restarts" in str(ends[1].error)
    assert [path.name for path in attempt.folder.glob("requeue.*")] == ["requeue.7.0"]


def test_a_job_with_other_code_than_was_copied_for_it_makes_nothing(
    entry: Entry, tmp_path: Path
) -> None:
    """As where a wrapper around Python, or a container, sets a PYTHONPATH of its own."""
    code = tmp_path / ".lockstep/code/0123456789abcdef"
    attempt = entry.new_attempt(launch(root=tmp_path, code=code))
    assert run_attempt(str(attempt.folder)) == "failed"
    assert attempt.result is not None
    assert f"this job has its code from {CODE}, not from {code}" in str(attempt.result.error)
    assert not entry.out.exists()
