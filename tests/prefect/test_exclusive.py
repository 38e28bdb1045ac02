"""One pipeline at a time in one clone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.runs.exclusive import only_pipeline
from tests.waiting import TIMEOUT_S

# A pipeline that starts a dvc-like child, hands it the lock, and waits to be killed.
PIPELINE = """
import subprocess, sys, time
from pathlib import Path
from pipelines.runs.exclusive import only_pipeline
from pipelines.base.repository import Repository
with only_pipeline(Repository(Path.cwd()), "lockstep run") as lock:
    child = subprocess.Popen(["sleep", sys.argv[1]], pass_fds=[lock], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


def start_pipeline(folder: Path, child_seconds: float) -> tuple[subprocess.Popen[bytes], int]:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", PIPELINE, str(child_seconds)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_pipeline_is_refused_by_name_of_the_first(tmp_path: Path) -> None:
    first, child = start_pipeline(tmp_path, TIMEOUT_S)
    try:
        expected = rf"another pipeline runs in this clone: lockstep run \(process {first.pid} on "
        with pytest.raises(LockstepError, match=expected), only_pipeline(Repository(tmp_path), "b"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        first.kill()
        first.wait()


def test_after_a_kill_the_next_pipeline_waits_for_what_was_left_running(tmp_path: Path) -> None:
    first, child = start_pipeline(tmp_path, TIMEOUT_S)
    first.kill()
    first.wait()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.kill(child, signal.SIGKILL)  # only its descriptor keeps the lock

    with only_pipeline(Repository(tmp_path), "second", say):
        assert not Path(f"/proc/{child}/fd/1").exists()
    assert said == ["waiting for what an earlier pipeline left running"]


def test_one_after_the_other_is_fine(tmp_path: Path) -> None:
    for _ in range(2):
        with only_pipeline(Repository(tmp_path), "lockstep run"):
            assert (tmp_path / ".lockstep/run.json").exists()
        assert not (tmp_path / ".lockstep/run.json").exists()
