"""Ctrl-C, kill and kill -9: nothing half-written, no second job, the same bytes at the end."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.clones import copy_clone
from pipelines.ledger.entry import Ledger
from tests.conftest import SERVER, Clone, kill_each
from tests.pipeline.test_session import COUNTING_STAGE
from tests.waiting import ended, failed, stop, succeeded, until, until_said

pytestmark = pytest.mark.slow

LONG = 6_000
"""Steps, of which nobody sees the last, unless what should end them does not."""
WAITS_AT_STEP_10 = """

import time

from stages.context import Context

_progress = Context.progress


def _waiting(ctx, done, *rest, **metrics):
    _progress(ctx, done, *rest, **metrics)
    while done == 10 and (ctx.folder.parents[3] / "hold").exists() and not ctx.should_stop():
        time.sleep(0.05)


Context.progress = _waiting
"""


@pytest.fixture(scope="module")
def counting_root(finished_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the finished clone with an SFT stage that counts: it has nothing to import, and sleeps."""
    clone = Clone(copy_clone(finished_root, tmp_path_factory.mktemp("counting") / "clone"))
    clone.without_tracking()
    clone.write_code("stages/sft.py", COUNTING_STAGE)
    clone.run("dvc", "repro", "code", LOCKSTEP_WARM="off")
    return clone.root


@pytest.fixture
def counting(counting_root: Path, tmp_path: Path) -> Iterator[Any]:
    """A copy of it."""
    clone = Clone(copy_clone(counting_root, tmp_path / "clone"))
    clone.without_tracking()
    yield clone
    clone.kill_all()


@pytest.fixture
def long_sft(counting: Any) -> Any:
    """One that counts for long enough to be caught at it."""
    counting.set_params(sft__epochs=LONG)
    return counting


@pytest.fixture
def held_sft(counting: Any) -> Any:
    """One that counts, and waits before its last step until it is let go."""
    counting.set_params(sft__epochs=20)
    (counting.root / "hold").touch()
    return counting


def let_go(clone: Any) -> None:
    (clone.root / "hold").unlink()


def workers(clone: Any) -> list[psutil.Process]:
    """Processes of jobs and of their drivers; the shipper of metrics ends by itself."""
    return [
        p for p, words in clone.command_lines().items() if "pipelines.export.shipping" not in words
    ]


def kill_9_all_but_the_job(clone: Any, driver: subprocess.Popen[str], job: psutil.Process) -> None:
    """Kill runner, dvc and stage driver, and wait until the system has forgotten them."""
    spared = {job.pid, *(child.pid for child in job.children(recursive=True))}
    killed = [process for process in workers(clone) if process.pid not in spared]
    kill_each(killed)
    ended(driver)
    # DVC's locks count a process as living until somebody has waited for it.
    until(lambda: not any(psutil.pid_exists(p.pid) for p in killed), "processes gone")


def assert_nothing_half_written(clone: Any) -> None:
    until(lambda: not workers(clone), "no process left in the clone")
    assert not (clone.root / "artifacts/policies/sft/model").exists()
    leftovers = [
        path for path in (clone.root / "artifacts").rglob(".*") if path.name != ".gitignore"
    ]
    assert leftovers == []
    assert clone.status()["state"] == "cancelled"


def test_ctrl_c_in_dvc_repro_cancels_the_job(long_sft: Any) -> None:
    driver, _ = long_sft.start_training()
    os.killpg(driver.pid, signal.SIGINT)
    output = failed(driver)
    assert "SIGINT received; cancelling job" in output
    assert_nothing_half_written(long_sft)


def test_ctrl_c_in_lockstep_run_cancels_the_job(long_sft: Any) -> None:
    driver, _ = long_sft.start_training("lockstep", "run", "sft")
    os.kill(driver.pid, signal.SIGINT)
    output = ended(driver)
    assert driver.returncode == 2
    assert "the running stages were cancelled" in output
    assert_nothing_half_written(long_sft)


def test_lockstep_cancel_ends_the_job_of_another_command(long_sft: Any) -> None:
    driver, _ = long_sft.start_training()
    assert "sft: cancelled job" in long_sft.run("lockstep", "cancel", "sft").stdout
    output = failed(driver)
    assert "cancelled; progress is saved: run the same command to continue" in output
    assert_nothing_half_written(long_sft)
    again = long_sft.run("lockstep", "cancel", "sft", check=False)
    assert "no live job of sft" in again.stdout


@pytest.mark.parametrize(
    "command", [("dvc", "repro", "--single-item", "sft"), ("lockstep", "run", "sft")]
)
def test_kill_of_the_driver_leaves_no_job(long_sft: Any, command: tuple[str, ...]) -> None:
    driver, _ = long_sft.start_training(*command)
    os.kill(driver.pid, signal.SIGTERM)
    ended(driver)
    assert_nothing_half_written(long_sft)


def test_a_cancelled_stage_goes_on_and_ends_with_the_same_bytes(finished: Any) -> None:
    finished.without_tracking()
    training = (finished.root / "stages/sft.py").read_text()
    finished.write_code("stages/sft.py", training + WAITS_AT_STEP_10)
    finished.set_params(sft__epochs=10)
    finished.run("dvc", "repro", "--single-item", "sft")
    entry = Ledger(finished.root / ".lockstep/jobs").latest("sft")["sft"]
    assert len((entry.folder / "metrics.jsonl").read_text().splitlines()) == 20
    undisturbed = (finished.root / "dvc.lock").read_text()
    (finished.root / "hold").touch()
    driver, _ = finished.start_training("dvc", "repro", "--single-item", "--force", "sft")
    stop(driver, signal.SIGINT)
    assert_nothing_half_written(finished)
    # It may have stopped before the step at which it would have waited.
    let_go(finished)
    finished.run("dvc", "repro", "--single-item", "--force", "sft")
    assert finished.status()["attempts"] == 2
    assert (finished.root / "dvc.lock").read_text() == undisturbed


def the_driver_and_who_stands_in_for_it(clone: Any) -> tuple[psutil.Process, psutil.Process]:
    """Under a plain `dvc repro`: the process that was forked, and the one that DVC has started."""
    both = [p for p, words in clone.command_lines().items() if words[-2:] == ["stage", "sft"]]
    assert len(both) == 2, both
    forked = [process for process in both if SERVER in process.parent().cmdline()]
    assert len(forked) == 1, both
    both.remove(forked[0])
    return forked[0], both[0]


@pytest.mark.parametrize("who", ["the driver", "who stands in for it"])
def test_a_forked_driver_and_the_process_that_dvc_has_started_end_together(
    held_sft: Any, who: str
) -> None:
    held_sft.have_servers(["dvc", "repro"], {})
    ready = lambda: "ready" in next(held_sft.root.glob(".lockstep/warm/control-*/log")).read_text()  # noqa: E731
    until(ready, "a server that forks drivers")
    dvc, before = held_sft.start_training()
    driver, stand_in = the_driver_and_who_stands_in_for_it(held_sft)
    kill_each([driver if who == "the driver" else stand_in])
    assert "failed to reproduce 'sft'" in failed(dvc)
    until(lambda: not (driver.is_running() or stand_in.is_running()), "both gone")
    assert psutil.Process(int(before["job"])).is_running()
    again = held_sft.start_forked("dvc", "repro", "--single-item", "sft")
    until_said(again, "its job still runs; waiting for it")
    let_go(held_sft)
    succeeded(again)
    assert held_sft.status()["attempts"] == 1


def test_after_kill_9_of_everything_but_the_job_the_same_command_waits_for_it(
    held_sft: Any,
) -> None:
    driver, before = held_sft.start_training("lockstep", "run", "sft")
    job = psutil.Process(int(before["job"]))
    kill_9_all_but_the_job(held_sft, driver, job)
    assert job.is_running()
    again = held_sft.start_forked("dvc", "repro", "--single-item", "sft")
    until_said(again, "its job still runs; waiting for it")
    let_go(held_sft)
    succeeded(again)
    after = held_sft.status()
    assert (after["state"], after["attempts"], after["job"]) == ("up to date", 1, before["job"])


def test_a_job_that_finished_unattended_is_harvested(held_sft: Any) -> None:
    driver, before = held_sft.start_training("lockstep", "run", "sft")
    job = psutil.Process(int(before["job"]))
    kill_9_all_but_the_job(held_sft, driver, job)
    let_go(held_sft)
    held_sft.until_state("completed")
    output = held_sft.run("dvc", "repro", "--single-item", "sft").stdout
    assert "found finished; publishing" in output
    assert held_sft.status()["attempts"] == 1


def test_kill_9_of_the_worker_is_named_and_the_next_command_goes_on(held_sft: Any) -> None:
    driver, row = held_sft.start_training()
    job = psutil.Process(int(row["job"]))
    kill_each([*job.children(recursive=True), job])
    output = ended(driver)
    assert "sft: died: its process exited without reporting a result" in output
    let_go(held_sft)
    held_sft.run("dvc", "repro", "--single-item", "sft")
    assert held_sft.status()["attempts"] == 2


def test_a_second_pipeline_in_the_clone_is_refused_and_the_first_goes_on(long_sft: Any) -> None:
    first, _ = long_sft.start_training("lockstep", "run", "sft")
    second = long_sft.run("lockstep", "run", check=False)
    assert second.returncode == 2
    assert "another pipeline runs in this clone: lockstep run" in second.stdout
    assert long_sft.status()["state"] == "running"
    os.kill(first.pid, signal.SIGTERM)
    ended(first)


def test_status_and_logs_answer_while_dvc_holds_its_locks(long_sft: Any) -> None:
    driver, _ = long_sft.start_training()
    rows = json.loads(long_sft.run("lockstep", "status", "--json").stdout)["stages"]
    row = next(row for row in rows if row["stage"] == "sft")
    assert row["state"] == "running"
    assert row["elapsed"] > 0
    assert "loss" in row["progress"]
    assert "attempt 1" in long_sft.run("lockstep", "logs", "sft").stdout
    stop(driver, signal.SIGINT)
