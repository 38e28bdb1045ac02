"""Stages as a dvc process: how `lockstep run` and the Prefect flow have them computed or restored.

DVC alone decides what is computed, restored or left, and records it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import PROFILE_VARIABLE
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger.invocation import Invocation
from pipelines.warm.child import Request
from pipelines.warm.client import Forked, fork, prepare
from pipelines.warm.identity import Identity, Kind, is_switched_off

ONLY_RESTORE = "LOCKSTEP_ONLY_RESTORE"
"""Tells the command of a stage that it is not to compute anything."""


def dvc_command(*stages: str) -> list[str]:
    """How stages are run: by DVC, which waits for its lock instead of giving up on it."""
    return [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *stages]


def dvc_environment(profile: str, invocation: Invocation) -> dict[str, str]:
    """The environment of such a command: dvc.yaml calls `python`, which must be this one."""
    return {**os.environ, **invocation.export(), PROFILE_VARIABLE: profile, "PATH": dvc_path()}


def dvc_path() -> str:
    """PATH with this Python before any other."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run_dvc(
    stages: Sequence[str], repository: Repository, environment: dict[str, str], failure: str
) -> None:
    """Run stages to their end; where they fail, LockstepError with `failure` and DVC's output."""
    done = subprocess.run(
        dvc_command(*stages),
        cwd=repository.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise LockstepError(f"{failure}:\n{done.stdout}")


def start_dvc(
    stages: Sequence[str],
    repository: Repository,
    environment: dict[str, str],
    output: Path,
    lock: int,
    *,
    only_restore: bool = False,
) -> "Forked | subprocess.Popen[bytes]":
    """Start stages in the background, one after the other, the output appended to a file.

    With `only_restore`, one that DVC cannot restore fails instead of being computed. The process
    has a session of its own: a Ctrl-C in the terminal reaches the caller alone, which passes it
    on in order. It holds the clone's lock with the caller, so that the lock lasts as long as
    anything writes to the workspace.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    words = dvc_command(*stages)
    if only_restore:
        environment = {**environment, ONLY_RESTORE: "1"}
    with open_log(output) as stream, Path(os.devnull).open("rb") as nothing:
        files = [nothing.fileno(), stream.fileno(), stream.fileno(), lock]
        if (forked := _fork(repository, words, environment, files)) is not None:
            return forked
        return subprocess.Popen(
            words,
            cwd=repository.root,
            env=environment,
            stdin=nothing,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )


def interrupt(process: "Forked | subprocess.Popen[bytes]") -> None:
    """Ctrl-C for all that such a process has started; dvc ignores it while a command runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)


def prepare_dvc(repository: Repository, environment: dict[str, str]) -> None:
    """Have a server start from which the processes of stages are forked."""
    if not is_switched_off():
        with suppress(OSError):
            prepare(repository, _identity(repository, environment))


def _fork(
    repository: Repository, words: list[str], environment: dict[str, str], files: list[int]
) -> Forked | None:
    if is_switched_off():
        return None
    request = Request.from_here(words[2], words[3:], environment, str(repository.root))
    with suppress(OSError):  # a full disk, say, of which the stage itself has more to tell
        return fork(repository, _identity(repository, environment), request, files, waits=True)
    return None


def _identity(repository: Repository, environment: dict[str, str]) -> Identity:
    return Identity(Kind.CONTROL, (sys.executable,), take_snapshot(repository), environment)
