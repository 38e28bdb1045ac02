"""Preemption, time limits and lost nodes: the stage goes on from its scratch, to the same bytes."""

import shutil
import signal
from typing import Any

import pytest

from tests.slurm.conftest import STAGE, lose_node
from tests.waiting import failed, stop, succeeded


def checkpoints(clone: Any) -> list[Any]:
    return list(clone.root.glob(".lockstep/jobs/sft/*/scratch/checkpoint-*"))


def finish(clone: Any, driver: Any, expected: str) -> str:
    output: str
    output = succeeded(driver)
    assert clone.lock() == expected
    steps = clone.steps()
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    entries = list(clone.root.glob(".lockstep/jobs/sft/*/spec.json"))
    assert len(entries) == 1, "one entry, and so one MLflow run"
    return output


def preempt(clone: Any, node: str) -> str:
    """Fill the node with urgent work; the number of the job that does it."""
    node_flag = f"--nodelist={node}"
    words = ["sbatch", "--parsable", "-p", "urgent", node_flag, "--exclusive", "-o", "/dev/null"]
    return str(clone.cluster.run(*words, "--wrap", "sleep 300")).strip()


@pytest.mark.slow
def test_preemption_with_requeue(medium_sft: Any, undisturbed_lock: str) -> None:
    # None but the one on the warning.
    medium_sft.set_profile(partition="spot", checkpoint_seconds=600)
    driver, row = medium_sft.start_training()
    urgent = preempt(medium_sft, row["nodes"])
    medium_sft.until(lambda: checkpoints(medium_sft), "saved on the warning")
    medium_sft.release()
    output = finish(medium_sft, driver, undisturbed_lock)
    after = medium_sft.status()
    assert (after["job"], after["attempts"], after["restarts"]) == (row["job"], 1, 1)
    assert "restart 1" in output
    medium_sft.cluster.run("scancel", urgent)


@pytest.mark.slow
def test_preemption_with_cancel(medium_sft: Any, undisturbed_lock: str) -> None:
    # None but the one on the warning.
    medium_sft.set_profile(partition="spot-cancel", checkpoint_seconds=600)
    driver, row = medium_sft.start_training()
    preempt(medium_sft, row["nodes"])
    medium_sft.until(lambda: checkpoints(medium_sft), "saved on the warning")
    medium_sft.release()
    finish(medium_sft, driver, undisturbed_lock)
    assert medium_sft.status()["restarts"] == 1


@pytest.mark.slow
def test_preemption_of_a_worker_that_does_not_listen(long_sft: Any) -> None:
    """It is killed at the end of its grace, and a new job goes on from the last checkpoint."""
    long_sft.set_profile(partition="spot-cancel")
    code = (long_sft.root / "stages/sft.py").read_text()
    deaf = "save(step)\n            if False:"
    long_sft.write_code("stages/sft.py", code.replace("if stop:", deaf))
    driver, row = long_sft.start_training(*STAGE)
    preempt(long_sft, row["nodes"])
    again = long_sft.until(
        lambda: (r := long_sft.status())["attempts"] == 2 and r["progress"] and r, "going on"
    )
    assert (again["restarts"], again["job"] != row["job"]) == (1, True)
    steps = long_sft.steps()
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    output = stop(driver, signal.SIGTERM)
    assert f"job {row['job']} was preempted" in output
    assert "going on in a new job (restart 1 of 3)" in output


@pytest.mark.slow
def test_a_lost_node_with_requeue(medium_sft: Any, undisturbed_lock: str) -> None:
    medium_sft.set_profile(checkpoint_seconds=0.2)
    driver, row = medium_sft.start_training()
    medium_sft.until(lambda: checkpoints(medium_sft), "something to go on from")
    lose_node(medium_sft.cluster, row["nodes"])
    medium_sft.release()
    finish(medium_sft, driver, undisturbed_lock)
    after = medium_sft.status()
    assert (after["attempts"], after["restarts"]) == (1, 1)
    assert after["nodes"] != row["nodes"]


@pytest.mark.slow
def test_a_time_limit_is_survived_by_going_on(long_sft: Any) -> None:
    """The limit is shortened; Slurm looks at limits twice a minute, so the warning comes early.

    So it does at the next of these looks, and leaves a minute until the job would be killed.
    """
    long_sft.set_profile(sft={"signal_lead_seconds": 60})
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scontrol", "update", f"JobId={row['job']}", "EndTime=now+90")
    # The shorter limit holds for the next start as well, which is warned in its turn.
    long_sft.until(lambda: long_sft.status()["restarts"] >= 1, "a restart")
    second = long_sft.training()
    assert second["job"] == row["job"]
    resumed = long_sft.steps()
    assert resumed == list(range(1, len(resumed) + 1))
    assert checkpoints(long_sft), "saved before the limit"
    stop(driver)


def test_the_warning_reaches_the_worker_and_not_its_helpers(long_sft: Any) -> None:
    """A helper process that a stage has started must live to help it save."""
    start = "    import subprocess\n    helper = subprocess.Popen(['sleep', '3000'])\n"
    long_sft.begin_with("sft", start)
    text = (long_sft.root / "stages/sft.py").read_text()
    note = f"open('{long_sft.root}/helper', 'a').write(f'{{helper.poll()}} ')"
    text = text.replace("raise Stopped", f"time.sleep(1); {note}; raise Stopped")
    long_sft.write_code("stages/sft.py", text)
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    long_sft.until(lambda: long_sft.status()["restarts"] == 1, "a restart")
    assert (long_sft.root / "helper").read_text() == "None ", "it lived when the stage saved"
    stop(driver)


def test_a_command_of_slurm_that_fails_once_does_not_end_the_job(
    medium_sft: Any, undisturbed_lock: str
) -> None:
    """On the node, as it is about to be put back into the queue: the controller is away."""
    folder = medium_sft.root.parent / "flaky"
    folder.mkdir()
    for name in ("squeue", "scontrol"):
        (folder / name).write_text(
            f'#!/bin/sh\n[ -e {folder}/{name}-failed ] && exec {shutil.which(name)} "$@"\n'
            f"touch {folder}/{name}-failed\necho 'Unable to contact slurm controller' >&2\nexit 1\n"
        )
        (folder / name).chmod(0o755)
    medium_sft.set_profile(setup=[f"export PATH={folder}:$PATH"])
    driver, row = medium_sft.start_training()
    medium_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    medium_sft.until(lambda: medium_sft.status()["restarts"] == 1, "a restart")
    medium_sft.release()
    finish(medium_sft, driver, undisturbed_lock)
    assert len(list(folder.glob("*-failed"))) == 2


def test_restarts_are_bounded(long_sft: Any) -> None:
    long_sft.set_profile(requeues=1)
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    long_sft.until(lambda: long_sft.status()["restarts"] == 1, "a restart")
    long_sft.training()
    long_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    output = failed(driver)
    assert "its profile allows no more restarts (requeues: 1)" in output
    assert long_sft.status()["state"] == "failed"
    assert long_sft.jobs() == []


def test_a_finished_job_that_is_requeued_by_hand_does_nothing(quick_sft: Any) -> None:
    quick_sft.run("dvc", "repro", "--single-item", "sft")
    row, lock = quick_sft.status(), quick_sft.lock()
    quick_sft.until(lambda: not quick_sft.jobs(), "the job's end")
    quick_sft.cluster.run("scontrol", "requeue", row["job"])
    record = next(quick_sft.root.glob(".lockstep/jobs/sft/*/record.json"))
    before = record.read_text()
    quick_sft.until(lambda: quick_sft.attempt().restarts == 1, "a restart")
    quick_sft.until(lambda: not quick_sft.jobs(), "its end")
    assert quick_sft.lock() == lock
    assert quick_sft.status()["state"] == "up to date"
    assert record.read_text() == before
    assert not list(record.parent.glob("scratch"))
