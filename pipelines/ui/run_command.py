"""What the buttons of the Run page do: the same commands that a terminal has.

`lockstep run` is started as a process of its own, which outlives the server and the page, with its
output in `.lockstep/ui/run.log`. To cancel ends that command as Ctrl-C would; where jobs run
without one, it ends the jobs.
"""

import io
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.base.background import start_process
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository
from pipelines.config.profiles import load_profile
from pipelines.host.address import HERE
from pipelines.runs.cancel import cancel_stages
from pipelines.runs.exclusive import running_pipeline

COMMAND = "lockstep run"
SETTLES_S = 2.5
"""How long to watch a command that was started: most that it refuses, it refuses by then."""
POLL_S = 0.05
TAIL = 16


@dataclass(frozen=True)
class Output:
    """The end of what the command that a page started last has printed."""

    lines: tuple[str, ...]
    time: float
    """When it last printed something."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def output_of(repository: Repository) -> Output | None:
    path = _log(repository)
    try:
        return Output(_last_lines(path), path.stat().st_mtime)
    except FileNotFoundError:
        return None


def start_run(repository: Repository, targets: list[str], profile: str) -> str:
    """Start `lockstep run`; what it says, or LockstepError with why it would not run."""
    load_profile(repository.root, profile)
    if holder := running_pipeline(repository):
        raise LockstepError(
            f"{holder['command']} runs already, in process {holder['pid']}: wait for it, or cancel"
        )
    path = _log(repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # Here, where the page is served, whichever host is remembered for commands.
    words = [sys.executable, "-m", "pipelines", "run", "--host", HERE, "--profile", profile]
    words += ["--", *targets]
    with open_log(path) as log:
        process = start_process(words, repository.root, dict(os.environ), log)
    # Its end is waited for by a thread, so that no dead process is left in the table.
    threading.Thread(target=process.wait, daemon=True).start()
    deadline = time.monotonic() + SETTLES_S
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    said = "\n".join(_last_lines(path))
    if process.returncode:
        raise LockstepError(said.removeprefix("lockstep: ") or f"see {path}")
    return said if process.returncode == 0 else f"{COMMAND} is on its way"


def cancel(repository: Repository, stage: str | None) -> str:
    """End the jobs of a stage and of those that need it; without one, all that runs."""
    holder = running_pipeline(repository) if stage is None else None
    here = holder is not None and holder.get("host") in (None, socket.gethostname())
    if holder and here and holder["command"] == COMMAND:
        try:
            os.kill(holder["pid"], signal.SIGTERM)
        except ProcessLookupError:
            return "it has just ended"
        except PermissionError:
            raise LockstepError(
                f"process {holder['pid']} is another user's: only its owner can end it"
            ) from None
        return "cancelling what runs; progress is saved"
    said = io.StringIO()
    cancel_stages(repository, [stage] if stage else [], Console(said))
    return said.getvalue().strip()


def _log(repository: Repository) -> Path:
    return repository.home / "ui/run.log"


def _last_lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
