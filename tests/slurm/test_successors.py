"""A chain on a cluster that forbids requeueing: whatever Slurm ends, the next job goes on."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.ledger.entry import Ledger
from pipelines.slurm.link import Link
from tests.slurm.conftest import let_the_controller_save
from tests.slurm.light_stages import DIGESTING_STAGE
from tests.slurm.test_chain import drain, states
from tests.slurm.test_requeue import preempt
from tests.waiting import succeeded


def chain_of(clone: Any) -> Path:
    (chain,) = clone.root.glob(".lockstep/chains/*")
    return Path(chain)


def next_attempt(clone: Any, number: int) -> dict[str, Any]:
    """The row of `status` once the stage's so manieth attempt is at work."""

    def is_at_work() -> dict[str, Any] | None:
        row: dict[str, Any] = clone.status()
        works = row["state"] == "running" and row["attempts"] >= number
        return row if works and row["progress"] else None

    row: dict[str, Any] = clone.until(is_at_work, f"attempt {number} at work")
    assert row["attempts"] == number
    return row


def until_successor(clone: Any, row: dict[str, Any]) -> None:
    """Until its successor is in the queue; it is before the stage begins."""
    jobs = clone.cluster.run("squeue", "-h", "-o", "%E").split()
    assert any(f"afternotok:{row['job']}(" in waits for waits in jobs), jobs


def the_end(clone: Any, attempts: int) -> None:
    """Of the chain; no more attempts at the stage are made on the way."""

    def is_over() -> bool:
        assert clone.status()["attempts"] == attempts
        return not clone.jobs()

    clone.until(is_over, "the end of the chain")


@contextmanager
def nobody_submits(clone: Any) -> Iterator[None]:
    """Jobs of the chain come as far as to where they queue a successor."""
    with (chain_of(clone) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_what_a_user_cancels_does_not_go_on(long_sft: Any) -> None:
    long_sft.set_profile(requeue=False)
    long_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    row = next_attempt(long_sft, 1)
    until_successor(long_sft, row)
    long_sft.cluster.run("scancel", row["job"])
    the_end(long_sft, 1)
    after = long_sft.status()
    assert (after["state"], after["attempts"]) == ("cancelled", 1)
    assert f"job {row['job']} was cancelled from outside" in after["error"]
    assert states(long_sft)["rollout@iter_001"] == "cancelled"


def test_what_needs_a_lost_stage_does_not_run(long_sft: Any) -> None:
    """Nobody is left to take it out of the queue: it finds that out by itself."""
    long_sft.set_profile(requeues=0)
    long_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    row = next_attempt(long_sft, 1)
    worker = long_sft.attempt().worker
    assert worker
    os.kill(worker.pid, signal.SIGKILL)
    the_end(long_sft, 1)
    after = long_sft.status("rollout@iter_001")
    assert after["state"] == "cancelled"
    assert after["error"].startswith(f"sft: job {row['job']}: rank 0 on {row['nodes']}: Killed")


def test_restarts_are_bounded_and_slurm_may_restart_too(long_sft: Any) -> None:
    long_sft.set_profile(requeue=False, requeues=1)
    long_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    first = next_attempt(long_sft, 1)
    until_successor(long_sft, first)
    let_the_controller_save(long_sft.cluster)
    long_sft.cluster.kill_controller()
    long_sft.cluster.start_controller()
    long_sft.cluster.run("scancel", "--name=wrap")
    long_sft.cluster.run("scancel", "--signal=USR2", first["job"])
    second = next_attempt(long_sft, 2)
    assert (second["restarts"], second["job"] != first["job"]) == (1, True)
    jobs = long_sft.cluster.run("squeue", "-h", "-o", "%E")
    assert f"afternotok:{second['job']}(" not in jobs, "it has no successor"
    long_sft.cluster.run("scancel", "--signal=USR2", second["job"])
    the_end(long_sft, 2)
    after = long_sft.status()
    assert (after["state"], after["attempts"]) == ("failed", 2)
    assert "its profile allows no more restarts (requeues: 1)" in after["error"]
    assert states(long_sft)["rollout@iter_001"] == "cancelled"
    steps = long_sft.steps()
    assert steps == list(range(1, len(steps) + 1)), "each step once"


@pytest.mark.slow
def test_a_job_that_starts_finds_out_what_a_killed_one_left_undone(medium_sft: Any) -> None:
    """It is killed before it has queued its successor."""
    medium_sft.write_code("stages/rollout.py", DIGESTING_STAGE)
    medium_sft.set_profile(requeue=False, partition="spot")
    node = medium_sft.cluster.layout.names[0]
    drain(medium_sft.cluster)
    medium_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    with nobody_submits(medium_sft):
        medium_sft.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        first = medium_sft.until_state("starting")
        urgent = preempt(medium_sft, node)
        medium_sft.until(lambda: first["job"] not in medium_sft.jobs(), "it was preempted")
        medium_sft.cluster.run("scancel", urgent)
    medium_sft.cluster.up()
    second = next_attempt(medium_sft, 1)
    assert second["restarts"] == 1
    until_successor(medium_sft, second)
    medium_sft.release()
    the_end(medium_sft, 1)
    after = states(medium_sft)
    assert (after["sft"], after["rollout@iter_001"]) == ("up to date", "up to date")
    assert medium_sft.steps() == list(range(1, 61)), "each step once"


@pytest.mark.slow
def test_a_command_that_waits_follows_the_successors(
    medium_sft: Any, undisturbed_lock: str
) -> None:
    medium_sft.set_profile(requeue=False)
    medium_sft.run("lockstep", "run", "--chain", "sft")
    first = next_attempt(medium_sft, 1)
    assert "no live job is unwanted" in medium_sft.run("lockstep", "status", "--orphans").stdout
    driver = medium_sft.start("lockstep", "run", "sft")
    entry = Ledger(medium_sft.root / ".lockstep/jobs").latest("sft")["sft"]
    medium_sft.until(entry.has_driver, "it waits for the chain's job")
    medium_sft.cluster.run("scancel", "--signal=USR2", first["job"])
    next_attempt(medium_sft, 2)
    medium_sft.release()
    output = succeeded(driver)
    assert "stages are up to date" in output
    the_end(medium_sft, 2)
    recorder = Link(chain_of(medium_sft) / "links/record")
    assert "stages are up to date" in "".join(path.read_text() for path in recorder.attempt.logs())
    assert medium_sft.status()["attempts"] == 2, "nobody submitted a third job"
    assert medium_sft.lock() == undisturbed_lock
