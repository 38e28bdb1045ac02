"""The job ledger: a folder under `.lockstep/jobs` for each thing ever asked to be computed.

    <stage>/<fingerprint>-<number>/     an entry: one chain of attempts at one spec
        spec.json                       what to compute
        entry.json                      who asked, when, at which commit
        attempts/001/                   one submission: logs, launch.json, worker.json, result.json
            tasks/                      a report of each process of a job on Slurm
            usage/                      what each process took so far
            preflight/                  what the ranks found out about their nodes
            scheduler.json              what Slurm last said about it
            successor.json              of a job in a chain: who goes on if it is ended early
        scratch/                        what the stage needs to go on, over all attempts
        metrics.jsonl progress.json tables/       what the stage says, over all attempts
        out/                            the outputs, complete, until DVC has recorded them, and
                                        `hashes`, those of their files
        record.json                     what came out, with hashes, host and times: the end

The state of a job is never stored, it is read off these files and off the lock that a living worker
holds; for a job on Slurm, where locks may not reach from node to node, off what Slurm last said.
Each file has one writer. So nothing has to be repaired after a death, and `status` needs no lock of
DVC's.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.owners import not_ours
from pipelines.base.processes import is_named_by_a_process, process_lives, this_process
from pipelines.config.profiles import ExecutorKind
from pipelines.identity.spec import Spec
from pipelines.ledger import files, mailbox
from pipelines.ledger.launch import Launch
from pipelines.ledger.preflight import BadNode, bad_nodes_of, each_once
from pipelines.ledger.record import Origin, Record
from pipelines.ledger.reports import Result, TaskReport, Worker
from pipelines.ledger.scheduler_view import SchedulerView
from pipelines.ledger.state import PAUSED, WAITING, State
from pipelines.ledger.successor import Successor

FAILURE_PREFIX = "FAILED-"
"""Begins the name of a mark that a failed process leaves: one listing tells of it."""
METRICS_OUT = "metrics"
"""The summary metrics, among the outputs."""


@dataclass(frozen=True)
class Attempt:
    """One submission of an entry's job, in a folder of its own."""

    folder: Path

    @property
    def entry(self) -> "Entry":
        return Entry(self.folder.parent.parent)

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def result(self) -> Result | None:
        """What the worker, or whoever could not start one, reported at the end."""
        return files.read(Result, self.folder / "result.json")

    @property
    def launch(self) -> Launch | None:
        return files.read(Launch, self.folder / "launch.json")

    @property
    def launched(self) -> Launch:
        """How an attempt is run that must have been launched."""
        return files.load(Launch, self.folder / "launch.json")

    @property
    def worker(self) -> Worker | None:
        return files.read(Worker, self.folder / "worker.json")

    def write(self, value: Launch | Worker | Result | SchedulerView) -> None:
        files.write(self.folder / _NAMES[type(value)], value)

    @property
    def session(self) -> "Attempt | None":
        """The session that it was posted to; its folder has the form of an attempt's."""
        launch = self.launch
        return Attempt(launch.session) if launch and launch.session else None

    @property
    def scheduler(self) -> SchedulerView:
        """What Slurm last said: its jobs (in a session, the session's), and whether all ended."""
        path = (self.session or self).folder / "scheduler.json"
        return files.read(SchedulerView, path) or SchedulerView()

    @property
    def successor(self) -> "Attempt | None":
        """Of a job in a chain: the one in the queue that goes on where this one is ended early."""
        named = files.read(Successor, self.folder / "successor.json")
        return Attempt(named.folder) if named else None

    @property
    def current(self) -> "Attempt":
        """Itself or, where it was ended early, the successor that is about to go on."""
        successor = self.successor
        if successor is None or self.state() is not State.DIED:
            return self
        later = successor.current
        waits = later.jobs and later.state().alive
        return later if waits or later.was_cancelled else self

    @property
    def jobs(self) -> list[str]:
        """Slurm's numbers of its jobs, as far as they are known."""
        launch = self.launch
        noted = launch.jobs if launch else ()
        known = {*noted, *(job.partition("_")[0] for job in self.scheduler.jobs)}
        return sorted(job for job in known if job.isdigit())

    @property
    def job(self) -> str:
        """The job's name for people."""
        launch = self.launch
        return (launch and launch.job) or ",".join(self.jobs) or "?"

    @property
    def tasks(self) -> list[TaskReport]:
        """What each process of the job last reported."""
        paths = sorted(self.folder.glob("tasks/*.json"))
        return [report for path in paths if (report := files.read(TaskReport, path))]

    @property
    def restarts(self) -> int:
        """How often Slurm has started the job again."""
        return max((task.restart for task in self.tasks), default=0)

    @property
    def bad_nodes(self) -> tuple[BadNode, ...]:
        """Those that it has been told of, and those that it has found (in a session, that has)."""
        launch, session = self.launch, self.session
        told = launch.excluded if launch else ()
        found = bad_nodes_of(session.folder) if session else ()
        return each_once((*told, *bad_nodes_of(self.folder), *found))

    @property
    def on_slurm(self) -> bool:
        launch = self.launch
        return launch is not None and launch.executor is ExecutorKind.SLURM

    @property
    def prepared(self) -> bool:
        """Whether a dry run has written it down and nobody has submitted it."""
        launch = self.launch
        return bool(launch and launch.prepared) and not (self.worker or self.scheduler.jobs)

    @property
    def never_started(self) -> bool:
        """Whether it died with whoever was to submit it: no process of it was ever seen."""
        launch = self.launch
        noted = self.worker or self.result or (launch and launch.pid)
        return not noted and not self.on_slurm and self.state() is State.DIED

    @property
    def was_cancelled(self) -> bool:
        return (self.folder / "cancelled.json").exists()

    def mark_cancelled(self) -> None:
        atomic.write_json(self.folder / "cancelled.json", {"time": time.time()})

    def state(self) -> State:
        if (result := self.result) is not None:
            return State(result.state)
        if self.on_slurm:
            return self._state_on_slurm()
        if (session := self.session) is not None:
            return self._state_in(session)
        # A worker has the lock when it notes that it is there: one that is noted by now, and has no
        # lock afterwards, has ended.
        noted = self.worker is not None
        if is_locked(self.folder / "alive"):
            return State.RUNNING
        starts = not (noted or self.was_cancelled) and self._may_still_start()
        if (result := self.result) is not None:
            return State(result.state)  # written since
        if starts:
            return State.STARTING
        return State.CANCELLED if self.was_cancelled else State.DIED

    def _state_on_slurm(self) -> State:
        """A job that was cancelled counts as such at once: nobody waits for it any more."""
        if self.was_cancelled:
            return State.CANCELLED
        if any(self.folder.glob(f"tasks/{FAILURE_PREFIX}*")):
            return State.FAILED
        seen = self.scheduler
        states = {job.state for job in seen.jobs.values()}
        if seen.ended:
            return State.CANCELLED if "CANCELLED" in states else State.DIED
        if states.issubset(WAITING):
            return State.QUEUED
        if states.intersection(PAUSED) and "RUNNING" not in states:
            return State.SUSPENDED
        return State.RUNNING if self.worker else State.STARTING

    def _state_in(self, session: "Attempt") -> State:
        """A session that lives reports how each attempt ended, so only its own end is looked at."""
        waits = mailbox.is_waiting(session.folder, self.folder)
        posted = waits or mailbox.is_taken(session.folder, self.folder)
        if not posted and not self.was_cancelled and self.is_being_submitted():
            return State.STARTING
        if not (posted and session.state().alive):
            if (result := self.result) is not None:
                return State(result.state)  # written since
            return State.CANCELLED if self.was_cancelled else State.DIED
        if waits:
            return State.QUEUED
        return State.RUNNING if self.worker else State.STARTING

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*_log.out")) + sorted(self.folder.glob("*_log.err"))

    def _may_still_start(self) -> bool:
        """Whether the submitted process lives or, where none is noted, there may be one."""
        launch = self.launch
        if launch and launch.pid:
            return process_lives(launch.pid, launch.pid_started)
        return self.is_being_submitted() or is_named_by_a_process(str(self.folder))

    def is_being_submitted(self) -> bool:
        """Whether the process that submits it, on this host, is still at it."""
        launch = self.launch
        return bool(launch and launch.submitter and launch.submitter.lives_here())


_NAMES: dict[type, str] = {
    Launch: "launch.json",
    Worker: "worker.json",
    Result: "result.json",
    SchedulerView: "scheduler.json",
}


@dataclass(frozen=True)
class Entry:
    """One chain of attempts at one spec."""

    folder: Path

    @property
    def spec(self) -> Spec:
        return Spec.read(self.folder / "spec.json")

    @property
    def origin(self) -> Origin:
        return files.load(Origin, self.folder / "entry.json")

    @property
    def asked_for(self) -> float:
        """When a command last wanted it."""
        path = self.folder / "entry.json"
        return path.stat().st_mtime if path.exists() else 0.0

    @property
    def stage(self) -> str:
        return self.folder.parent.name

    @property
    def record(self) -> Record | None:
        return files.read(Record, self.folder / "record.json")

    @property
    def outs(self) -> dict[str, str]:
        """The hashes of what came out, as soon as they are known."""
        attempts = self.attempts()
        end = self.record or (attempts[-1].result if attempts else None)
        return (end and end.outs) or {}

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def attempts(self) -> list[Attempt]:
        """Every submission, oldest first."""
        return [attempt for attempt in self._folders() if not attempt.prepared]

    def _folders(self) -> list[Attempt]:
        """The submissions, and perhaps one that a dry run has only written down."""
        paths = sorted((self.folder / "attempts").glob("[0-9]*"))
        return [Attempt(path) for path in paths if path.exists()]

    def new_attempt(self, launch: Launch) -> Attempt:
        """The folder for the next submission: a new one, unless a dry run has prepared one.

        It comes with its launch.json, which says who is submitting it: after a kill, one that
        nobody has submitted is told from one whose job is on its way.
        """
        launch = replace(launch, submitter=this_process())
        written = self._folders()
        if written and written[-1].prepared:
            written[-1].write(launch)
            return written[-1]
        folder = self._next_folder()
        aside = atomic.unique(folder)
        shutil.rmtree(aside, ignore_errors=True)
        Attempt(aside).write(launch)
        aside.rename(folder)
        return Attempt(folder)

    def adopt_attempt(self, folder: Path) -> Attempt:
        """Take a submission that was made before it was known what it would compute."""
        written = self._folders()
        if written and written[-1].prepared:
            shutil.rmtree(written[-1].folder)
        link = self._next_folder()
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return Attempt(link)

    def _next_folder(self) -> Path:
        used = [int(path.name) for path in (self.folder / "attempts").glob("[0-9]*")]
        return self.folder / "attempts" / f"{max(used, default=0) + 1:03}"

    @property
    def current(self) -> Attempt | None:
        """The attempt that tells how it stands: the last one, or a successor in the queue."""
        attempts = self.attempts()
        return attempts[-1].current if attempts else None

    def state(self) -> State:
        if self.record is not None:
            return State.PUBLISHED
        current = self.current
        state = current.state() if current else State.NEW
        return State.COMPLETED if self.out.exists() and not state.alive else state

    @contextmanager
    def lease(self, timeout_s: float = 0.0) -> Iterator[None]:
        """One driver at a time for one entry.

        It is waited for: the driver of a command that was killed may still be ending its job, and
        whoever asks `has_driver` has the lock for a moment.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with hold_lock(self.folder / "driver") as held:
                if held:
                    yield
                    return
            if time.monotonic() > deadline:
                raise LockstepError(
                    f"{self.stage}: another command in this clone is already waiting for this job; "
                    "see `lockstep status`"
                )
            time.sleep(0.05)

    def has_driver(self) -> bool:
        """Whether a command waits for it."""
        return is_locked(self.folder / "driver")


class Ledger:
    """All entries of a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_or_create(self, spec: Spec, origin: Origin) -> Entry:
        """The entry for this very spec whose outputs DVC has not recorded yet, or a new one."""
        stem = spec.fingerprint[:12]
        numbers = [0]
        for path in sorted((self.folder / spec.stage).glob(f"{stem}-*")):
            entry = Entry(path)
            if entry.state() is not State.PUBLISHED or entry.out.exists():
                self._make_newest(spec.stage, path / "entry.json")  # asked for again
                return entry
            numbers.append(int(path.name.rsplit("-", 1)[1]))
        entry = Entry(self.folder / spec.stage / f"{stem}-{max(numbers) + 1:03}")
        aside = atomic.unique(entry.folder)
        shutil.rmtree(aside, ignore_errors=True)
        files.write(aside / "entry.json", replace(origin, created=time.time()))
        spec.write(aside / "spec.json")
        self._make_newest(spec.stage, aside / "entry.json")
        try:
            aside.rename(entry.folder)
        except OSError:
            if not entry.folder.is_dir():
                raise
            shutil.rmtree(aside)  # another command has made the same at this moment
        return entry

    def _make_newest(self, stage: str, mark: Path) -> None:
        """Date it after all others of its stage, even those from before the clock was set back."""
        newest = max((entry.asked_for for entry in self.entries(stage)), default=0.0)
        now = max(time.time(), newest + 0.001)
        try:
            os.utime(mark, (now, now))
        except PermissionError:
            raise not_ours(mark) from None

    def entries(self, stage: str = "*") -> list[Entry]:
        """Every entry, or every one of a stage, by when it was last asked for."""
        entries = [Entry(path.parent) for path in self.folder.glob(f"{stage}/[!.]*/spec.json")]
        return sorted(entries, key=lambda entry: (entry.asked_for, entry.folder.name))

    def latest(self, stage: str = "*") -> dict[str, Entry]:
        """The newest entry of each stage, or of one."""
        return {entry.stage: entry for entry in self.entries(stage)}
