"""The process of a session: takes on one post after another, and runs it as a worker does.

Always true:
- An attempt runs here exactly as in a process of its own: from its folder, through the worker's
  code, with its own logs, and in a process put back to how it was before the last one.
- It runs with the very copy of the code that it was posted with. Where that is another than this
  process has loaded, or where the last attempt failed and may have left anything behind, the
  process replaces itself by a fresh one, under the same number, before it takes the next post on.
- It ends when told to, when idle for too long, before its time is over, and when its clone is gone.
  What it runs then stops at a step boundary and goes on without it; what waits was never taken.
"""

import fcntl
import importlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipelines.base.console import say_anything
from pipelines.base.imports import uncollected
from pipelines.base.processes import end_processes
from pipelines.base.redact import RedactedStream
from pipelines.base.redacted_log import close_to_others, open_log, output_put_back
from pipelines.config.profiles import ExecutorKind, Resources, bytes_of
from pipelines.ledger import mailbox
from pipelines.ledger.entry import Attempt
from pipelines.ledger.reports import Worker
from pipelines.ledger.state import State
from pipelines.ledger.task import Task, find_task
from pipelines.slurm.signals import SlurmWarning
from pipelines.worker.preflight import BadNodes, check_node_of_session
from pipelines.worker.rendezvous import Gathering
from pipelines.worker.session import BEAT_S, HOST_MODULE, Heartbeat, Session
from pipelines.worker.worker import run_attempt
from stages.context import Stopped
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.engines.models import resident
from stages.engines.processes import clean_slate, determinism

POLL_S = 0.1
_LOCK = "LOCKSTEP_SESSION_LOCK"
_SERVED = "LOCKSTEP_SESSION_SERVED"
"""What a process hands to the one it replaces itself by: its lock, and its count."""


class Host:
    """One start of a session, from the inside."""

    def __init__(self, session: Session, warning: SlurmWarning) -> None:
        self.session = session
        self.code = Path(__file__).resolve().parents[2]
        self.served = int(os.environ.pop(_SERVED, 0))
        self.doing = "importing"
        self.current: tuple[Attempt, SlurmWarning] | None = None
        self.ending: str | None = None
        """Why it shall end, once it shall."""
        self.launch, worker = session.launch, session.host.worker
        minutes = self.launch.resources.time_minutes
        started = worker.time if worker else time.time()
        self._deadline = time.monotonic() + 60.0 * minutes - max(time.time() - started, 0.0)
        self._lock = _hold(session.folder / "alive")
        warning.answer(lambda: self._end("Slurm, or whoever has its process, told it to end"))

    def bad_node(self) -> str | None:
        """Why its node is one that it should not be on, if it is."""
        if self.served or self.launch.executor is not ExecutorKind.SLURM:
            return None
        self.doing = "checking its node"
        others = Gathering(Task(), lambda: self.ending is not None)
        try:
            task = find_task(Processes.ONE, 1)
            check_node_of_session(self.session.folder, self.launch, task, others)
        except BadNodes as error:
            return str(error)
        except Stopped:
            return self.ending
        return None

    def serve(self) -> str:
        """Run what is posted until there is a reason to end, which is returned."""
        idle_s = 60.0 * self.launch.idle_minutes
        self._import_stages()
        restore = clean_slate.remember()
        resident.switch_on(memory_to_keep(self.launch.resources))
        idle_since = time.monotonic()
        while True:
            self.doing = "idle"
            if self.ending:
                return self.ending
            posts = mailbox.waiting(self.session.folder)
            if not posts:
                if time.monotonic() - idle_since > idle_s:
                    return f"it was idle for {idle_s / 60:g} minutes"
                time.sleep(POLL_S)
                continue
            if posts[0].code.resolve() != self.code:
                self._replace(posts[0].code, "other code")
            attempt = Attempt(posts[0].attempt)
            if mailbox.take(self.session.folder, attempt.folder):
                ended = self._run(attempt)
                restore()
                clean_slate.free_memory()
                self.served += 1
                if ended == State.FAILED:
                    self._replace(self.code, "a stage that failed")
                if _left_threads():
                    self._replace(self.code, "a thread that a stage left")
            idle_since = time.monotonic()

    def watch(self) -> None:
        """In a thread: pass on what people and Slurm want, and send heartbeats."""
        beaten = -BEAT_S
        while True:
            try:
                if not self.session.folder.is_dir():
                    os._exit(1)  # the clone is gone, and with it all that an attempt could write to
                if self.session.end_requested:
                    self._end("it was told to end")
                elif time.monotonic() > self._deadline:
                    self._end("its time was over")
                if (current := self.current) and current[0].was_cancelled:
                    current[1].come()
                if time.monotonic() - beaten >= BEAT_S:
                    beaten = time.monotonic()
                    self._beat()
            except OSError:
                # A disk that is full or away for a moment: the attempt itself says so better.
                traceback.print_exc()
            time.sleep(POLL_S)

    def _end(self, why: str) -> None:
        """What it runs stops, and whoever goes on with that must not come here again."""
        if self.ending is None:
            self.ending = why
            self.session.request_end()
        if current := self.current:
            current[1].come()

    def _beat(self) -> None:
        beat = Heartbeat(
            time=time.time(),
            doing=self.doing,
            served=self.served,
            resident=tuple(resident.names()),
            reused=resident.reused(),
            code=self.code,
        )
        beat.write(self.session.folder)

    def _import_stages(self) -> None:
        """What every stage would import for itself, before the first one is posted."""
        if self.launch.resources.deterministic:
            determinism.before_import()
        with uncollected():
            for name in self.launch.stages:
                try:
                    importlib.import_module(STAGES[name].module)
                except Exception:
                    traceback.print_exc()  # whoever posts such a stage is told so

    def _run(self, attempt: Attempt) -> str:
        self.doing = attempt.entry.stage
        print(f"{attempt.entry.stage}: attempt {attempt.number} in {attempt.folder}", flush=True)
        order = SlurmWarning(listening=True)
        self.current = (attempt, order)
        if self.ending:
            order.come()
        before = {child.pid for child in psutil.Process().children()}
        with suppress(OSError):
            self._beat()
        try:
            with _written_to(attempt.folder, self.session.label):
                return run_attempt(str(attempt.folder), warning=order)
        finally:
            self.current = None
            left = [child for child in psutil.Process().children() if child.pid not in before]
            end_processes([child.pid for child in left if not _is_tracker(child)])

    def _replace(self, code: Path, why: str) -> None:
        """Go on as a fresh process with that code: same number, same session."""
        print(f"starting afresh: {why}", flush=True)
        end_processes([child.pid for child in psutil.Process().children()])
        os.set_inheritable(self._lock, True)
        variables = {"PYTHONPATH": str(code), _LOCK: str(self._lock), _SERVED: str(self.served)}
        words = [sys.executable, "-u", "-m", HOST_MODULE, str(self.session.folder)]
        os.execve(sys.executable, words, {**os.environ, **variables})


def memory_to_keep(resources: Resources) -> int | None:
    """Bytes of models: a share of what the job has; None where the device's own size decides."""
    has = bytes_of(resources.memory)
    return has // resident.SHARE if has and resources.device == "cpu" else None


def _hold(path: Path) -> int:
    """The lock that says that the session lives, until this process or its replacement ends."""
    if handed_on := os.environ.pop(_LOCK, None):
        os.set_inheritable(int(handed_on), False)
        return int(handed_on)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@contextmanager
def _written_to(folder: Path, name: str) -> Iterator[None]:
    """What is printed in here, by Python or by a library, goes to the attempt's own logs."""
    ends = {1: folder / f"{name}_0_log.out", 2: folder / f"{name}_0_log.err"}
    with output_put_back():
        for number, path in ends.items():
            with open_log(path) as log:
                os.dup2(log.fileno(), number)
        yield


def _left_threads() -> bool:
    main = threading.main_thread()
    return any(not thread.daemon for thread in threading.enumerate() if thread is not main)


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is Python's own helper for shared memory, which lives as long as the process."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def main() -> int:
    """What `lockstep session up` starts."""
    warning = SlurmWarning()
    warning.listen()
    say_anything()
    close_to_others()
    # Of the session itself; the attempts in it have logs of their own.
    sys.stdout, sys.stderr = map(RedactedStream, (sys.stdout, sys.stderr))  # type: ignore[assignment]
    session = Session(Path(sys.argv[1]).resolve())
    host = Host(session, warning)
    if session.host.worker is None:
        me = Worker(pid=os.getpid(), host=socket.gethostname(), time=time.time())
        session.host.write(me)
    threading.Thread(target=host.watch, name="session-watch", daemon=True).start()
    why = host.bad_node() or host.serve()
    print(f"ended: {why}", flush=True)
    session.note_end(why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
