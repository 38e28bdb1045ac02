"""One stage as a dvc process: how `lockstep run` and the Prefect flow have it computed.

DVC alone decides what is computed, restored or left, and records it.
"""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.invocation import Invocation
from pipelines.profiles import PROFILE_VARIABLE


def dvc_command(*stages: str) -> list[str]:
    """How stages are run: by DVC, which waits for its lock instead of giving up on it."""
    return [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *stages]


def dvc_environment(profile: str, invocation: Invocation) -> dict[str, str]:
    """The environment of such a command: dvc.yaml calls `python`, which must be this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **invocation.export(), PROFILE_VARIABLE: profile, "PATH": path}


def start_dvc(
    stage: str, root: Path, environment: dict[str, str], output: Path, lock: int
) -> subprocess.Popen[bytes]:
    """Start one stage in the background, its output appended to a file.

    It has a session of its own: a Ctrl-C in the terminal reaches the caller alone, which passes it
    on in order. It holds the clone's lock with the caller, so that the lock lasts as long as
    anything writes to the workspace.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as stream:
        return subprocess.Popen(
            dvc_command(stage),
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
