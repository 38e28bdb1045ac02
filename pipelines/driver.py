"""The driver brings one entry of the ledger to its end: find its job or submit one, wait, publish.

It may be killed at any moment: it keeps nothing that the ledger does not have. Run again, it finds
the job by its fingerprint and goes on from there.
"""

import signal
import time
from dataclasses import dataclass
from typing import Any

from pipelines import atomic
from pipelines.console import Console, describe_metrics, describe_progress, seconds
from pipelines.errors import LockstepError
from pipelines.executors import Executor
from pipelines.invocation import Invocation, dvc_ancestor
from pipelines.ledger import Attempt, Entry, State
from pipelines.logs import LAUNCHER_PREFIX
from pipelines.processes import process_lives
from pipelines.profiles import ExecutorKind, Resources
from pipelines.publish import publish
from pipelines.repository import Repository
from pipelines.shipper import start_shipper
from pipelines.tracking import ship_all

POLL_S = 0.1
LOG_TAIL = 20
SHIP_TIMEOUT_S = 15.0


class Cancelled(Exception):
    """Somebody asked for the end of the job; the message says who."""


@dataclass(frozen=True)
class Driver:
    """Waits for one stage on behalf of one command."""

    repository: Repository
    entry: Entry
    executor: Executor
    launch: dict[str, Any]
    """How the job is started: what the worker reads as launch.json."""
    invocation: Invocation
    console: Console

    def run(self) -> None:
        """Publish the entry's outputs, or raise with what went wrong and what to do."""
        try:
            with self.entry.lease():
                self._complete()
                record = publish(self.repository.root, self.entry)
        finally:
            self._ship()
        self._say_end(record)

    def _complete(self) -> None:
        state = self.entry.state()
        if state in (State.COMPLETED, State.PUBLISHED):
            self._say("found finished; publishing")
            return
        interrupts = Interrupts()
        if self.launch["executor"] is not ExecutorKind.DEBUG:
            # In this process, Ctrl-C belongs to the debugger.
            interrupts.catch()
        attempt = self.entry.attempts()[-1] if state.alive else self.entry.new_attempt()
        start_shipper(self.repository)
        if state.alive:
            self._say(f"its job still runs; waiting for it (log: {attempt.folder})")
        else:
            self._submit(attempt)
        try:
            self._wait(attempt, interrupts)
        except Cancelled as reason:
            job = (attempt.launch or {}).get("job", "?")
            self._say(f"{reason}; cancelling job {job}")
            attempt.mark_cancelled()
            self.executor.cancel(attempt)
        self._raise_unless_completed()

    def _submit(self, attempt: Attempt) -> None:
        """The worker reads launch.json, so it comes before the job; the job's id comes after."""
        again = f", attempt {attempt.number}" if attempt.number > 1 else ""
        self._say(f"submitting to {self.launch['profile']}{again} (log: {attempt.folder})")
        launch = {**self.launch, "time": time.time()}
        atomic.write_json(attempt.folder / "launch.json", launch)
        submitted = self.executor.submit(attempt, Resources.model_validate(launch["resources"]))
        atomic.write_json(attempt.folder / "launch.json", {**launch, **submitted})

    def _wait(self, attempt: Attempt, interrupts: "Interrupts") -> None:
        """Until the job has ended, or its end is asked for, or nobody is left to wait for it."""
        dvc = dvc_ancestor()
        said_run = False
        while (state := self.entry.state()).alive:
            if interrupts.received:
                raise Cancelled(f"{interrupts.received} received")
            if dvc is not None and not process_lives(dvc.pid, dvc.create_time()):
                raise Cancelled("the dvc process that started this stage is gone")
            if not self.invocation.lives():
                # Only kill -9 ends a runner without its telling us: leave the job to the next one.
                raise LockstepError(f"{self.entry.stage}: the pipeline is gone; its job goes on")
            said_run = said_run or self._say_run()
            if self.console.is_terminal:
                self._show_progress(attempt, state)
            time.sleep(POLL_S)
        self.console.clear()

    def _say_run(self) -> bool:
        tracking = atomic.read_json(self.entry.folder / "tracking.json") or {}
        if not tracking.get("run_id"):
            return False
        self._say(f"MLflow run {tracking.get('url') or tracking['run_id']}")
        return True

    def _show_progress(self, attempt: Attempt, state: State) -> None:
        progress = atomic.read_json(self.entry.folder / "progress.json")
        started = (attempt.worker or {}).get("time", time.time())
        what = describe_progress(progress, started) if state is State.RUNNING else state
        self.console.progress(f"{self.entry.stage}: {what}")

    def _raise_unless_completed(self) -> None:
        state = self.entry.state()
        stage = self.entry.stage
        if state is State.COMPLETED:
            return
        if state is State.CANCELLED:
            raise LockstepError(f"{stage}: cancelled; run the same command to go on from there")
        attempt = self.entry.attempts()[-1]
        reason = (attempt.result or {}).get(
            "error", "its process is gone without a word: killed, or out of memory?"
        )
        raise LockstepError(
            f"{stage}: {state}: {reason}\n{tail(attempt)}"
            f"full log: lockstep logs {stage}\n"
            "what is done is kept: mend the cause and run the same command again"
        )

    def _ship(self) -> None:
        """Let MLflow have what is there; in a folder that DVC will delete, wait until it has."""
        if self.repository.shared_home == self.repository.home:
            start_shipper(self.repository)
        else:
            ship_all(self.repository, timeout=SHIP_TIMEOUT_S)

    def _say_end(self, record: dict[str, Any]) -> None:
        taken = seconds(record["ended"] - record["started"])
        self._say(f"done in {taken}: {describe_metrics(record['metrics'])}")
        for path, digest in record["outs"].items():
            self._say(f"  {path}  {digest}")

    def _say(self, text: str) -> None:
        self.console.line(f"{self.entry.stage}: {text}")


class Interrupts:
    """Remembers the signal that asked the driver to end, to be looked at between two polls."""

    def __init__(self) -> None:
        self.received: str | None = None

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name


def tail(attempt: Attempt, lines: int = LOG_TAIL) -> str:
    """The last lines of what the job wrote to its error log."""
    written = [
        line
        for path in sorted(attempt.folder.glob("*_log.err"))
        for line in path.read_text(errors="replace").splitlines()
        if not line.startswith(LAUNCHER_PREFIX)
    ]
    return "".join(f"  | {line}\n" for line in written[-lines:])
