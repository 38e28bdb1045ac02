"""`lockstep run --host`: a laptop over a real ssh, a real cluster behind it, whatever breaks."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clone
from tests.sshd import NAME, Sshd, serving
from tests.waiting import failed, stop, succeeded, until_said


@pytest.fixture(scope="module")
def login(cluster: Any) -> Iterator[Sshd]:
    with serving({**cluster.environment, "LOCKSTEP_WARM": "off"}) as sshd:
        yield sshd


@dataclass(frozen=True)
class Laptop:
    clone: Clone
    there: Any
    """The clone on the cluster; its SFT waits to be released."""
    login: Sshd

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return self.clone.start_forked("lockstep", *words)

    def start_training(self) -> tuple["subprocess.Popen[str]", dict[str, Any]]:
        return self.start("run", "sft"), self.there.training()

    def lock(self) -> str:
        return (self.clone.root / "dvc.lock").read_text()


@pytest.fixture
def laptop(medium_sft: Any, login: Sshd, tmp_path: Path) -> Iterator[Laptop]:
    """Of the clone there it has what git has; it knows no Slurm."""
    root = tmp_path / "laptop"
    subprocess.run(["git", "clone", "-q", str(medium_sft.root), str(root)], check=True)
    clone = Clone(root)
    clone.without_tracking()
    clone.variables |= login.variables | {"LOCKSTEP_PROFILE": "slurm-dev"}
    clone.run("git", "config", "lockstep.host", f"{NAME}:{medium_sft.root}")
    clone.run("git", "config", "lockstep.hostPython", sys.executable)
    yield Laptop(clone, medium_sft, login)
    clone.kill_all()


def test_a_run_outlives_its_connection_and_ends_with_the_bytes_of_one_here(
    laptop: Laptop, undisturbed_lock: str
) -> None:
    driver, row = laptop.start_training()
    other = laptop.start("run", "sft", "--profile", "local")
    assert "another run is under way there: lockstep run sft with" in failed(other)
    laptop.login.log_in_anew()
    said = failed(driver)
    assert driver.returncode == 255, said
    assert "goes on there: the same command follows it again" in said
    # The command there is the same process as before: it waits for the same job.
    again = laptop.start("run", "sft")
    until_said(again, "following the run that began")
    assert "running" in laptop.clone.run("lockstep", "status").stdout
    laptop.there.release()
    said = succeeded(again)
    assert "sft: loss 1" in said
    assert "brought from there: dvc.lock" in said
    assert laptop.lock() == laptop.there.lock() == undisturbed_lock
    after = laptop.there.status()
    assert (after["attempts"], after["job"]) == (1, row["job"])
    # Nothing is left to do, and nothing to send or bring.
    said = laptop.clone.run("lockstep", "run", "sft").stdout
    assert "nothing to do" in said
    assert not {"sending", "brought"} & set(said.split())


def test_ctrl_c_twice_leaves_the_job_and_once_cancels_it(laptop: Laptop) -> None:
    """And with the params changed here, those are of the next run there."""
    driver, row = laptop.start_training()
    driver.send_signal(signal.SIGINT)
    until_said(driver, "press Ctrl-C again to leave them running")
    driver.send_signal(signal.SIGINT)
    assert "detached: the jobs go on" in failed(driver)
    assert driver.returncode == 2
    assert laptop.there.jobs() == [row["job"]]
    again = laptop.start("run", "sft")
    logs = laptop.there.root / ".lockstep/runs"
    laptop.there.until(
        lambda: any("its job still runs" in log.read_text() for log in logs.glob("*/sft.log")),
        "a driver waits for the job again",
    )
    said = stop(again, signal.SIGINT)
    assert "SIGINT received: the running stages were cancelled" in said
    assert laptop.there.status()["state"] == "cancelled"
    laptop.there.release()
    laptop.clone.set_params(sft__epochs=1)
    said = succeeded(laptop.start("run", "sft"))
    assert "sending params.yaml" in said
    assert "epochs: 1\n" in laptop.lock()
