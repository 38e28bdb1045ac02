"""One pipeline at a time in one clone, whoever starts it: `lockstep run` or a flow run.

The lock is held by the pipeline's process and by each dvc process that inherits its descriptor, so
it lasts until nothing of the pipeline writes to the workspace any more, even after a kill -9.
"""

import fcntl
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.console import ago
from pipelines.base.errors import LockstepError
from pipelines.base.processes import process_lives, this_process
from pipelines.base.redact import redact
from pipelines.base.repository import Repository

POLL_S, LONG_POLL_S = 0.2, 1.0
LEFT = "what an earlier pipeline left running"
PASSING = "lockstep record"
"""A command that is done in a moment, and worth waiting for."""


@contextmanager
def only_pipeline(
    repository: Repository,
    command: str,
    say: Callable[[str], None] = lambda _: None,
    *,
    wait: bool = False,
) -> Iterator[int]:
    """Be the clone's only pipeline, or raise with the name of the one that is; or wait for it.

    Yields the lock's descriptor, for `pass_fds` of the dvc processes. Where the pipeline that took
    the lock is dead and only its last dvc processes are left, they are waited for.
    """
    repository.home.mkdir(parents=True, exist_ok=True)
    holder_file = repository.home / "run.json"
    with (repository.home / "run.lock").open("a", encoding="utf-8") as lock:
        _take(lock.fileno(), holder_file, say, wait=wait)
        holder = {**asdict(this_process()), "time": time.time(), "command": redact(command)}
        atomic.write_json(holder_file, holder)
        try:
            yield lock.fileno()
        finally:
            holder_file.unlink(missing_ok=True)


def running_pipeline(repository: Repository) -> dict[str, Any] | None:
    """The command that is the clone's pipeline now, its process and when it began; None if none."""
    holder: dict[str, Any] | None = atomic.read_json(repository.home / "run.json")
    return holder if holder and _lives(holder) else None


def _lives(holder: dict[str, Any]) -> bool:
    """A process on another host holds the lock, so it lives."""
    if holder.get("host") not in (None, socket.gethostname()):
        return True
    return process_lives(holder["pid"], holder.get("started", ""))


def _take(lock: int, holder_file: Path, say: Callable[[str], None], *, wait: bool) -> None:
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = atomic.read_json(holder_file)
        passing = holder is not None and holder["command"] == PASSING
        busy = holder is not None and not passing and _lives(holder)
        if holder and busy and not wait:
            who = f"process {holder['pid']} on {holder.get('host')}, started {ago(holder['time'])}"
            raise LockstepError(
                f"another pipeline runs in this clone: {holder['command']} ({who}); "
                "wait for it or stop it; see `lockstep status`"
            )
        if not said:
            what = holder["command"] if holder and (passing or busy) else LEFT
            say(f"waiting for {what}")
            said = True
        time.sleep(LONG_POLL_S if busy else POLL_S)
