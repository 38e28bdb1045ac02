"""Which command a stage belongs to: one `dvc repro`, one `lockstep run` or one flow run.

DVC starts each stage as a process of its own and says nothing about the command behind it, so it is
found among the ancestors, or handed down in a variable by the commands that start dvc themselves.
"""

import hashlib
import json
import os
import shlex
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pipelines.base.processes import process_lives, start_of
from pipelines.base.redact import redact

VARIABLE = "LOCKSTEP_INVOCATION"
_caller: list[int] = []


@dataclass(frozen=True)
class Invocation:
    """One pipeline invocation: the parent of its stages' runs."""

    id: str
    command: str
    pid: int | None = None
    """The process behind it; None where only its jobs can tell whether it goes on."""
    pid_started: str = ""

    def export(self) -> dict[str, str]:
        """The variable that tells the stages below which invocation they belong to."""
        return {VARIABLE: json.dumps(asdict(self))}

    def lives(self) -> bool:
        """Whether the process behind it still runs."""
        return self.pid is not None and process_lives(self.pid, self.pid_started)


def new_invocation(command: str) -> Invocation:
    """An invocation of which this very process is the runner."""
    me = os.getpid()
    return Invocation(uuid.uuid4().hex[:12], redact(command), me, start_of(me))


def current_invocation() -> Invocation:
    """The invocation around this process: handed down, or the outermost dvc among the ancestors."""
    handed_down = os.environ.get(VARIABLE)
    if handed_down:
        return Invocation(**json.loads(handed_down))
    process = dvc_ancestor(outermost=True) or _caller_of_this()
    # The stages of one dvc must find the same id, each on its own. A pid comes round again; with
    # its start it does not.
    started = start_of(process.pid)
    what = f"{socket.gethostname()} {process.pid} {started}"
    identity = hashlib.sha256(what.encode()).hexdigest()[:12]
    return Invocation(identity, redact(_command_line(process)), process.pid, started)


def dvc_ancestor(*, outermost: bool = False) -> psutil.Process | None:
    """The nearest (or outermost) dvc process above this one."""
    try:
        above = [process for process in _caller_of_this().parents() if _is_dvc(process)]
    except psutil.NoSuchProcess:
        return None
    return above[-1 if outermost else 0] if above else None


def act_for(pid: int) -> None:
    """Take that process for this one: this one was forked elsewhere to do its work."""
    _caller[:] = [pid]


def _caller_of_this() -> psutil.Process:
    return psutil.Process(*_caller)


def _is_dvc(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name == "dvc" for word in words[:2]) or words[1:3] == ["-m", "dvc"]


def _command_line(process: psutil.Process) -> str:
    words = process.cmdline()
    start = next((i for i, word in enumerate(words) if Path(word).name in ("dvc", "lockstep")), 0)
    return shlex.join([Path(words[start]).name, *words[start + 1 :]]) if words else "?"
