"""Whoever waits for a job may go: by kill -9, by Ctrl-C, on purpose. The job is found again."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.conftest import kill_each
from tests.forks import MODULE
from tests.slurm.conftest import let_the_controller_save
from tests.slurm.light_stages import DIGESTING_STAGE
from tests.waiting import TIMEOUT_S, ended, failed, stop, succeeded, until_said

COMMANDS = [("dvc", "repro", "--single-item", "sft"), ("lockstep", "run", "sft")]


def is_of_slurm(process: psutil.Process, words: list[str]) -> bool:
    try:
        return process.name().startswith(("srun", "slurm")) or "slurm_script" in str(words)
    except psutil.NoSuchProcess:
        return False


def kill_9_everything_but_the_job(clone: Any, driver: subprocess.Popen[str]) -> None:
    workers = clone.workers()
    killed = [
        process
        for process, words in clone.command_lines().items()
        if process not in workers and not is_of_slurm(process, words)
    ]
    kill_each(killed)
    ended(driver)
    clone.until(lambda: not any(psutil.pid_exists(p.pid) for p in killed), "processes gone")


def wait_again(clone: Any) -> None:
    """The same command finds the job, which ends only then, and waits for it."""
    driver = clone.start_sft()
    found = next(
        (line for line in driver.stdout if "its job still runs; waiting for it" in line), None
    )
    clone.release()
    output = succeeded(driver)
    assert found, output


@pytest.mark.parametrize("command", COMMANDS)
def test_after_kill_9_the_same_command_waits_for_the_live_job(
    medium_sft: Any, undisturbed_lock: str, command: tuple[str, ...]
) -> None:
    driver, before = medium_sft.start_training(*command)
    kill_9_everything_but_the_job(medium_sft, driver)
    assert before["job"] in medium_sft.jobs()
    wait_again(medium_sft)
    after = medium_sft.status()
    assert (after["attempts"], after["job"]) == (1, before["job"])
    assert medium_sft.lock() == undisturbed_lock


def test_kill_9_of_dvc_alone_lets_the_driver_go_and_the_job_stay(long_sft: Any) -> None:
    driver, row = long_sft.start_training(*COMMANDS[0])
    psutil.Process(driver.pid).kill()
    output = ended(driver)
    assert "detached (the dvc process that started this stage is gone)" in output
    assert row["job"] in long_sft.jobs()


def test_a_job_that_finished_unattended_is_harvested(
    medium_sft: Any, undisturbed_lock: str
) -> None:
    driver, _ = medium_sft.start_training("lockstep", "run", "sft")
    kill_9_everything_but_the_job(medium_sft, driver)
    medium_sft.release()
    medium_sft.until_state("completed")
    output = medium_sft.run("dvc", "repro", "--single-item", "sft").stdout
    assert "found finished; publishing" in output
    assert medium_sft.lock() == undisturbed_lock
    assert medium_sft.status()["attempts"] == 1


def test_a_driver_killed_before_it_noted_the_job_finds_it(
    medium_sft: Any, undisturbed_lock: str
) -> None:
    driver, row = medium_sft.start_training()
    kill_9_everything_but_the_job(medium_sft, driver)
    # As if the kill had come between sbatch and the line that notes its answer.
    attempt = medium_sft.attempt()
    attempt.write(replace(attempt.launched, job=None, jobs=(), token=None))
    (attempt.folder / "scheduler.json").unlink()
    wait_again(medium_sft)
    after = medium_sft.status()
    assert (after["attempts"], after["job"]) == (1, row["job"])
    assert medium_sft.lock() == undisturbed_lock


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_cancels_the_job_and_says_which(long_sft: Any, command: tuple[str, ...]) -> None:
    driver, row = long_sft.start_training(*command)
    os.killpg(driver.pid, signal.SIGINT)
    output = failed(driver)
    assert "SIGINT received; cancelling" in output
    assert f"job {row['job']}" in output
    assert "press Ctrl-C again to leave" in output
    assert row["job"] not in long_sft.jobs()
    assert long_sft.status()["state"] == "cancelled"


@pytest.mark.parametrize("command", [COMMANDS[0], (*MODULE, "run", "sft")])
def test_ctrl_c_twice_leaves_the_job_running(long_sft: Any, command: tuple[str, ...]) -> None:
    """With more time for the second than people get."""
    driver_code = long_sft.root / "pipelines/driver/driver.py"
    limit, code = "\nSECOND_INTERRUPT_S = 4.0\n", driver_code.read_text()
    assert limit in code
    driver_code.write_text(code.replace(limit, f"\nSECOND_INTERRUPT_S = {TIMEOUT_S}\n"))
    driver, row = long_sft.start_training(*command)
    os.killpg(driver.pid, signal.SIGINT)
    until_said(driver, "press Ctrl-C again to leave")
    os.killpg(driver.pid, signal.SIGINT)
    output = failed(driver)
    assert "detached" in output
    assert row["job"] in long_sft.jobs()
    assert long_sft.status()["state"] == "running"


def test_a_closed_terminal_leaves_the_job_running(long_sft: Any) -> None:
    driver, row = long_sft.start_training("lockstep", "run", "sft")
    output = stop(driver, signal.SIGHUP)
    assert "detached: the jobs go on" in output
    assert row["job"] in long_sft.jobs()


def test_detach_submits_and_returns(medium_sft: Any) -> None:
    medium_sft.write_code("stages/reward_model.py", DIGESTING_STAGE)
    hold = str(medium_sft.root / "hold")
    wait = f"    import os, time\n    while os.path.exists({hold!r}):\n        time.sleep(0.1)\n"
    medium_sft.begin_with("reward_model", wait)
    output = medium_sft.run("lockstep", "run", "--detach").stdout
    assert "sft: submitted to slurm-dev as job" in output
    assert "reward_model: submitted to slurm-dev as job" in output
    assert "more stages need what these make" in output
    assert len(medium_sft.jobs()) == 2
    assert "still runs" in medium_sft.run("lockstep", "run", "--detach", "sft").stdout
    medium_sft.release()
    medium_sft.until(lambda: not medium_sft.jobs(), "both done")
    output = medium_sft.run("lockstep", "record").stdout
    assert "recorded: sft, reward_model" in output
    assert "3 of 9 stages are up to date" in output


def test_a_cancelled_job_is_never_waited_for_again(long_sft: Any) -> None:
    """Even while it still dies: its worker does not listen, so Slurm needs a while to end it."""
    driver, row = long_sft.start_training()
    long_sft.workers()[0].send_signal(signal.SIGSTOP)
    canceller = long_sft.start("lockstep", "cancel", "sft")
    long_sft.until_state("cancelled")
    ended(driver)
    again = long_sft.start_sft()
    second = long_sft.until(
        lambda: (r := long_sft.status())["attempts"] == 2 and r["job"] and r, "a second attempt"
    )
    assert second["job"] != row["job"]
    assert row["job"] not in long_sft.jobs(), "never two jobs at one stage"
    ended(canceller)
    stop(again)


def test_the_controller_may_die_and_come_back(medium_sft: Any, undisturbed_lock: str) -> None:
    cluster = medium_sft.cluster
    driver, _ = medium_sft.start_training()
    let_the_controller_save(cluster)
    cluster.kill_controller()
    time.sleep(4)
    cluster.start_controller()
    medium_sft.release()
    succeeded(driver)
    assert medium_sft.status()["attempts"] == 1
    assert medium_sft.lock() == undisturbed_lock


def test_a_job_is_submitted_when_the_controller_comes_back(quick_sft: Any) -> None:
    let_the_controller_save(quick_sft.cluster)
    quick_sft.cluster.kill_controller()
    driver = quick_sft.start_sft()
    time.sleep(6)
    assert driver.poll() is None
    quick_sft.cluster.start_controller()
    succeeded(driver)
    assert quick_sft.status()["attempts"] == 1
