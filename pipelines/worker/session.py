"""A session: one process that stays, and runs one posted attempt after another.

    .lockstep/sessions/<name>/<number>/     one start of a session; the newest is the session
        launch.json                         profile, resources, which stages it serves, code, job
        worker.json result.json             where it runs; why it ended
        mailbox/ taken/                     what is posted to it, and what it has taken on
        heartbeat.json                      what it does, what it has served and keeps in memory
        down.json                           it shall end

The folder has the form of an attempt's, and so has its state: on this machine it is read off the
lock that the process holds, on Slurm off what Slurm says. A session is a shortcut and nothing else:
whoever finds it gone, or other than a stage wants it, runs the stage as if there were none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipelines.base import atomic
from pipelines.base.console import seconds
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.ledger import files, mailbox
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.reports import Result
from pipelines.ledger.state import State

HOST_MODULE = "pipelines.worker.session_host"
BEAT_S = 5.0
STALE_S = 120.0
"""A process without a heartbeat for so long hangs. Wrong clocks cost time, no bytes."""
_ALIKE = ("device", "python", "container", "setup", "cpus_per_task", "deterministic")
"""What a process has for good: a stage that wants it otherwise needs another one."""


@dataclass(frozen=True)
class Heartbeat:
    """heartbeat.json: what a session does, and a sign that it still does."""

    VERSION: ClassVar[int] = 1

    time: float
    doing: str = ""
    served: int = 0
    resident: tuple[str, ...] = ()
    """The models that it keeps in memory."""
    reused: int = 0
    code: Path = Path()

    def write(self, folder: Path) -> None:
        files.write(folder / "heartbeat.json", self)


@dataclass(frozen=True)
class Session:
    """One start of a session, in a folder of its own."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.parent.name

    @property
    def label(self) -> str:
        """Its name for people, and in the attempts that it ran."""
        return f"{self.name}-{self.folder.name}"

    @property
    def host(self) -> Attempt:
        """Its process, as the ledger sees one."""
        return Attempt(self.folder)

    @property
    def launch(self) -> Launch:
        return self.host.launched

    @property
    def heartbeat(self) -> Heartbeat | None:
        return files.read(Heartbeat, self.folder / "heartbeat.json")

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat; none where it has not sent any yet."""
        beat = self.heartbeat
        return max(time.time() - beat.time, 0.0) if beat else 0.0

    @property
    def end_requested(self) -> bool:
        return (self.folder / "down.json").exists()

    def request_end(self) -> None:
        atomic.write_json(self.folder / "down.json", {"time": time.time()})

    def why_not(self) -> str | None:
        """Why nothing should be posted to it, in words; None where it takes posts."""
        state = self.host.state()
        if not state.alive:
            result = self.host.result
            return (result and result.why) or f"it {state}"
        if self.end_requested:
            return "it was told to end"
        if self.silent_s > STALE_S:
            return f"no heartbeat for {self.silent_s:.0f} s"
        return None

    def note_end(self, why: str) -> None:
        """Why it ended, for whoever asks."""
        self.host.write(Result(state=State.COMPLETED, why=why, ended=time.time()))

    def as_json(self) -> dict[str, Any]:
        launch, worker, result = self.launch, self.host.worker, self.host.result
        beat = self.heartbeat or Heartbeat(time.time())
        return {
            "name": self.name,
            "number": int(self.folder.name),
            "state": "ended" if result else str(self.host.state()),
            "why": result.why if result else None,
            "profile": launch.profile,
            "stages": list(launch.stages),
            "job": launch.job,
            "host": worker.host if worker else None,
            "pid": worker.pid if worker else None,
            "doing": beat.doing or None if not result else None,
            "served": beat.served,
            "waiting": len(mailbox.waiting(self.folder)) if not result else 0,
            "resident": list(beat.resident) if not result else [],
            "reused": beat.reused,
            "silent_seconds": round(self.silent_s, 1),
            "idle_minutes": launch.idle_minutes,
            "log": str(self.folder),
        }


def describe(session: Session) -> str:
    """A line for people."""
    now = session.as_json()
    where = f" on {now['host']}" if now["host"] else ""
    head = f"{session.label}: {now['state']}{where}, profile {now['profile']}"
    if now["state"] == "ended":
        return f"{head}: {now['why']}"
    job = f", job {now['job']}" if session.host.on_slurm else f", process {now['job']}"
    parts = [
        head + job,
        f"serves {', '.join(now['stages'])}",
        now["doing"] or "",
        f"{now['served']} served, {now['waiting']} waiting",
        f"{len(now['resident'])} models in memory",
        f"last heard of {seconds(now['silent_seconds'])} ago" if now["silent_seconds"] > 15 else "",
        f"log {Path(now['log'])}",
    ]
    return "; ".join(filter(None, parts))


def sessions(repository: Repository) -> list[Session]:
    """The newest start of every session of the clone."""
    newest = {}
    for path in sorted((repository.home / "sessions").glob("*/[0-9]*/launch.json")):
        newest[path.parent.parent.name] = Session(path.parent)
    return list(newest.values())


def living(repository: Repository) -> list[Session]:
    return [session for session in sessions(repository) if session.host.state().alive]


def new_session(repository: Repository, name: str, launch: Launch) -> Session:
    """The folder of a session that is about to be started."""
    home = repository.home / "sessions" / name
    used = [int(path.name) for path in home.glob("[0-9]*")]
    folder = home / f"{max(used, default=0) + 1:03}"
    (folder / "mailbox").mkdir(parents=True)
    session = Session(folder)
    session.host.write(launch)
    return session


def misfit(has: Resources, wants: Resources, num_shards: int) -> str | None:
    """Why a process with the one's resources must not run a stage that wants the other's."""
    if wants.nodes * wants.tasks_per_node > 1:
        return "it trains with several processes"
    if num_shards > 1:
        return f"its work is shared out to {num_shards} jobs (shards)"
    if wants.gpus_per_node > has.gpus_per_node:
        return f"it wants {wants.gpus_per_node} GPUs, the session has {has.gpus_per_node}"
    for key in _ALIKE:
        its, ours = getattr(wants, key), getattr(has, key)
        if its != ours:
            return f"its `{key}` is {its}, the session's {ours}"
    return None


def serving(
    repository: Repository, stage: str, launch: Launch, say: Callable[[str], None]
) -> Session | None:
    """The session of this launch's profile that runs the stage; says so where one cannot."""
    if launch.executor not in (ExecutorKind.LOCAL, ExecutorKind.SLURM):
        return None
    for session in sessions(repository):
        its = session.launch
        if its.profile != launch.profile or stage not in its.stages:
            continue
        ended = session.host.result is not None
        why = session.why_not() or misfit(its.resources, launch.resources, launch.num_shards)
        if why is None:
            return session
        if not ended:
            say(f"session {session.label} does not run it: {why}; going on without")
    return None
