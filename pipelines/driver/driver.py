"""The driver brings one entry of the ledger to its end: find its job or submit one, wait, publish.

It may be killed at any moment: it keeps nothing that the ledger does not have. Run again, it finds
the job by its fingerprint and goes on from there. A job that Slurm took away from its stage, by
preemption, at its time limit or with its node, is followed through its restarts, or by a new job.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.base.console import Console, describe_metrics, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.interrupts import Interrupts
from pipelines.base.processes import lives, sleep_beside
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind
from pipelines.driver.activity import activity, why_it_waits
from pipelines.driver.executors import Executor
from pipelines.driver.session_watch import SessionWatch
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.invocation import Invocation, dvc_ancestor
from pipelines.ledger.launch import Launch
from pipelines.ledger.preflight import BadNode
from pipelines.ledger.publish import publish
from pipelines.ledger.record import Record
from pipelines.ledger.reports import Result
from pipelines.ledger.state import State
from pipelines.ledger.stop_requests import StopRequest, stop_request_of
from pipelines.slurm.outcome import Outcome, outcome_here, outcome_in_session, outcome_of, tail
from pipelines.slurm.submit import SUBMIT_AGAIN_S, missing_shards
from pipelines.tracking.cursor import StageCursor
from pipelines.tracking.health import Health
from pipelines.tracking.rounds import ship_all
from pipelines.tracking.shipper import start_shipper
from pipelines.worker.session import serving

POLL_S, LONG_POLL_S = 0.1, 0.3
"""The long one where it is seen when a job on this machine ends, or Slurm has the job."""
SHIP_TIMEOUT_S = 15.0
LEASE_TIMEOUT_S = 30.0
"""How long an earlier driver may take to end its job after its own command was killed."""
SECOND_INTERRUPT_S = 4.0
"""How long, after the first Ctrl-C was answered, a second one still saves the job."""


class Cancelled(Exception):
    """Somebody asked for the end of the job; the message says who."""


class Detached(LockstepError):
    """The job goes on without a driver."""


@dataclass(frozen=True)
class Driver:
    """Waits for one stage on behalf of one command."""

    repository: Repository
    entry: Entry
    executors: Callable[[ExecutorKind], Executor]
    launch: Launch
    """How the job is started."""
    invocation: Invocation
    console: Console
    identity: Callable[[], str]
    """The fingerprint of the stage as the workspace has it now."""
    health: Health
    announced: dict[str, Any] = field(default_factory=dict)

    def submit_only(self) -> None:
        """See to it that the stage has a job, and leave it at that."""
        with self.entry.lease(LEASE_TIMEOUT_S):
            if self._state(now=True).alive:
                self._say(f"its job {self._current().job} still runs")
            elif self.entry.state() in (State.COMPLETED, State.PUBLISHED):
                self._say("found finished; `lockstep record` has DVC record it")
            else:
                self._submit(0, (), Interrupts())

    def run(self) -> None:
        """Publish the entry's outputs, or raise with what went wrong and what to do."""
        try:
            with self.entry.lease(LEASE_TIMEOUT_S):
                self._complete()
                self._check_identity()
                record = publish(self.repository.root, self.entry)
        finally:
            self._ship()
        self._say_end(record)

    def _complete(self) -> None:
        interrupts = Interrupts()
        if self.launch.executor is not ExecutorKind.DEBUG:
            # In this process, Ctrl-C belongs to the debugger.
            interrupts.catch()
        if self._state(now=True) in (State.COMPLETED, State.PUBLISHED):
            self._say("found finished; publishing")
            return
        start_shipper(self.repository)
        restarts, bad = 0, tuple[BadNode, ...]()
        while True:
            if self._state().alive:
                attempt = self._current()
                self._say(f"its job still runs; waiting for it (log: {attempt.folder})")
            else:
                attempt = self._submit(restarts, bad, interrupts)
            self._wait(attempt, interrupts)
            if self.entry.state() is State.COMPLETED:
                return
            attempt = self._current()  # in a chain, a successor may have gone on
            if attempt.never_started:
                who = "its session ended" if attempt.session else "an earlier command died"
                self._say(f"{who} before its job was there; submitting it now")
                continue
            outcome = self._outcome(attempt)
            bad = attempt.bad_nodes
            restarts = attempt.launched.restarts_before + attempt.restarts
            if outcome.elsewhere:
                self._say_bad_nodes(attempt)
                self._say("going on in a new job")
                continue
            restarts += 1
            most = self.launch.resources.requeues
            if not (outcome.try_again and restarts <= most):
                self._give_up(attempt, outcome)
            self._say(f"{outcome.what}; going on in a new job (restart {restarts} of {most})")

    def _submit(self, restarts: int, bad: tuple[BadNode, ...], interrupts: Interrupts) -> Attempt:
        """The worker reads launch.json, so it comes before the job; the job's id comes after."""
        for earlier in self.entry.attempts():
            self._end_earlier(earlier)
        launch = replace(self.launch, time=time.time(), restarts_before=restarts, excluded=bad)
        session = serving(self.repository, self.entry.spec.name, launch, self._say)
        if session is not None:
            launch = replace(launch, executor=ExecutorKind.SESSION, session=session.folder)
        else:
            launch = replace(launch, shards=missing_shards(self.entry, launch))
        attempt = self.entry.new_attempt(launch)
        again = f", attempt {attempt.number}" if attempt.number > 1 else ""
        executor = self._executor(attempt)

        def pause(answer: str) -> None:
            self._say_once("trouble", answer, "Slurm does not take the job yet ({}); trying again")
            if attempt.was_cancelled:
                raise Cancelled("cancelled")
            self._handle_requests(attempt, interrupts)
            time.sleep(SUBMIT_AGAIN_S)

        try:
            submitted = executor.submit(attempt, pause)
        except (Cancelled, Detached):
            self._note_end(attempt, State.CANCELLED, "cancelled before it was submitted")
            raise LockstepError(
                f"{self.entry.stage}: cancelled before it was submitted; run the same command to "
                "continue"
            ) from None
        except BaseException as error:
            self._note_end(attempt, State.FAILED, str(error) or type(error).__name__)
            raise
        attempt.write(submitted)
        if session is not None:
            what = f"posted to session {session.label}{again}"
        else:
            job = f" as job {submitted.job}" if executor.leaves_jobs(attempt) else ""
            what = f"submitted to {launch.profile}{again}{job}"
        self._say(f"{what} (log: {attempt.folder})")
        return attempt

    def _note_end(self, attempt: Attempt, state: State, error: str) -> None:
        """Report for a worker that will not be there; should its job come yet, it does nothing."""
        attempt.mark_cancelled()
        attempt.write(Result(state=state, error=error))

    def _end_earlier(self, earlier: Attempt) -> None:
        """Two jobs must not work at one stage: end what is left of an attempt given up."""
        if earlier.on_slurm and earlier.jobs and not earlier.scheduler.ended:
            jobs = ",".join(earlier.jobs)
            self._say(f"waiting for the end of job {jobs}, which was given up")
            if not self._executor(earlier).cancel(earlier):
                raise LockstepError(
                    f"{self.entry.stage}: job {jobs} of an earlier attempt does not end, and two "
                    "jobs must not work at one stage; see `squeue` and run the same command later"
                )

    def _wait(self, attempt: Attempt, interrupts: Interrupts) -> None:
        """Until the job has ended, or its end is asked for, or nobody is left to wait for it."""
        dvc = dvc_ancestor()
        executor = self._executor(attempt)
        watch = SessionWatch(self.repository, attempt, self._say) if attempt.session else None
        try:
            while (state := self._state()).alive:
                attempt = self._current()
                self._handle_requests(attempt, interrupts)
                # Asked first: where both are one process, DVC's end is what is seen and said.
                pipeline_lives = self.invocation.lives()
                if dvc is not None and not lives(dvc):
                    self._nobody_waits(attempt, "the dvc process that started this stage is gone")
                if not pipeline_lives:
                    # Only kill -9 ends a runner without its telling us: leave the job to the next.
                    raise self._detached(attempt, "the pipeline is gone")
                if watch:
                    watch.check()
                self._say_changes(attempt, state, executor)
                if self.console.is_terminal:
                    warnings = self.health.of(self.entry.stage, self.entry)
                    doing = activity(self.entry, state, warnings)
                    self.console.progress(f"{self.entry.stage}: {doing}")
                leaves_jobs, pid = executor.leaves_jobs(attempt), attempt.launched.pid
                if pid and not leaves_jobs:
                    sleep_beside([pid], LONG_POLL_S)
                else:
                    time.sleep(LONG_POLL_S if leaves_jobs else POLL_S)
        except Cancelled as reason:
            self._say(f"{reason}; cancelling job {attempt.job}")
            attempt.mark_cancelled()
            if not executor.cancel(attempt):
                self._say(f"Slurm has not ended job {attempt.job} yet: `lockstep cancel` retries")
        self.console.clear()

    def _handle_requests(self, attempt: Attempt, interrupts: Interrupts) -> None:
        """Do what signals, or the command behind this stage, ask for."""
        request = stop_request_of(self.repository, self.invocation.id)
        if request is StopRequest.CANCEL:
            raise Cancelled("the command that waits for this stage was stopped")
        if request is StopRequest.DETACH:
            raise self._detached(attempt, "as asked")
        if not interrupts.received:
            return
        first = interrupts.received[0]
        if first.name == "SIGHUP":
            self._nobody_waits(attempt, "the terminal is gone")
        if first.name != "SIGINT" or not self._executor(attempt).leaves_jobs(attempt):
            raise Cancelled(f"{first.name} received")
        if len(interrupts.received) > 1:
            raise self._detached(attempt, "interrupted twice")
        if "interrupt" not in self.announced:
            self._say(
                f"SIGINT received; cancelling job {attempt.job} in {SECOND_INTERRUPT_S:.0f} s: "
                "press Ctrl-C again to leave it running"
            )
            self.announced["interrupt"] = time.monotonic()
        if time.monotonic() - self.announced["interrupt"] >= SECOND_INTERRUPT_S:
            raise Cancelled("SIGINT received")

    def _nobody_waits(self, attempt: Attempt, why: str) -> None:
        """Nobody waits any more: a job on this machine ends, one on Slurm does not."""
        if self._executor(attempt).leaves_jobs(attempt):
            raise self._detached(attempt, why)
        raise Cancelled(why)

    def _detached(self, attempt: Attempt, why: str) -> Detached:
        return Detached(
            f"{self.entry.stage}: detached ({why}); job {attempt.job} goes on. The same command "
            f"waits for it again; `lockstep cancel {self.entry.stage}` ends it"
        )

    def _outcome(self, attempt: Attempt) -> Outcome:
        state = self.entry.state()
        if state is State.CANCELLED and (attempt.was_cancelled or not attempt.on_slurm):
            raise LockstepError(
                f"{self.entry.stage}: cancelled; progress is saved: run the same command to "
                "continue"
            )
        if attempt.on_slurm and attempt.result is None:
            return outcome_of(attempt)
        if attempt.session is not None:
            return outcome_in_session(attempt)
        return outcome_here(attempt)

    def _give_up(self, attempt: Attempt, outcome: Outcome) -> None:
        state, stage = self.entry.state(), self.entry.stage
        if attempt.on_slurm:
            # One process has failed; the others must not wait for it, nor work on in vain.
            with suppress(LockstepError):  # the next submission insists on it
                self._end_earlier(attempt)
        raise LockstepError(
            f"{stage}: {state}: {outcome.what}\n{tail(attempt, outcome)}"
            f"full log: lockstep logs {stage}\n{outcome.advice}"
        )

    def _check_identity(self) -> None:
        """DVC would record the outputs under what the workspace holds now, whatever made them."""
        if self.identity() != self.entry.spec.fingerprint:
            raise LockstepError(
                f"{self.entry.stage}: its code, params or inputs changed while its job ran, so its "
                "outputs are not published: DVC would record them as made from the new ones. They "
                f"are kept in {self.entry.out}; undo the change and run the same command to have "
                "them, or just run it to compute the stage anew"
            )

    def _state(self, *, now: bool = False) -> State:
        if now:
            # Somebody may have submitted by hand what a dry run has written down.
            self.executors(self.launch.executor).refresh(now=True)
        attempts = self.entry.attempts()
        if attempts:
            executor = self._executor(attempts[-1])
            if now and executor.never_had(attempts[-1]):
                self._note_end(attempts[-1], State.FAILED, "its driver died before it submitted it")
            executor.refresh()
        return self.entry.state()

    def _current(self) -> Attempt:
        current = self.entry.current
        assert current is not None
        return current

    def _executor(self, attempt: Attempt) -> Executor:
        """Whoever has the job: an earlier command may have used another profile."""
        return self.executors((attempt.launch or self.launch).executor)

    def _say_changes(self, attempt: Attempt, state: State, executor: Executor) -> None:
        """What is worth a line: the run in MLflow, a warning, where Slurm has the job."""
        cursor = StageCursor.of(self.entry)
        if cursor.run_id and not self.announced.get("run"):
            self.announced["run"] = True
            self._say(f"MLflow run {cursor.url or cursor.run_id}")
        for symptom in self.health.of(self.entry.stage, self.entry):
            if not self.announced.get(symptom.kind):
                self.announced[symptom.kind] = True
                self._say(f"warning: {symptom}")
        if not executor.leaves_jobs(attempt):
            return
        self._say_once("trouble", executor.trouble(), "Slurm does not answer ({}); waiting for it")
        self._say_bad_nodes(attempt)
        reason = why_it_waits(attempt)
        worker = attempt.worker
        restart = worker.restart if worker else 0
        if state is State.QUEUED and reason:
            self._say_once("place", (restart, reason), f"queued ({reason})")
        elif state is State.RUNNING:
            nodes = ", ".join(sorted({job.nodes for job in attempt.scheduler.jobs.values()} - {""}))
            again = f", restart {restart}" if restart else ""
            self._say_once("place", (restart, "runs"), f"running on {nodes}{again}")
        elif state is State.SUSPENDED:
            what = f"suspended by Slurm; `scontrol resume {attempt.job}` has it go on"
            self._say_once("place", (restart, "suspended"), what)

    def _say_bad_nodes(self, attempt: Attempt) -> None:
        for bad in attempt.bad_nodes:
            self._say_once(f"bad {bad.node}", bad, "bad node {}; it is left out")

    def _say_once(self, topic: str, value: Any, text: str) -> None:
        if value != self.announced.get(topic):
            self.announced[topic] = value
            if value is not None:
                self._say(text.format(value))

    def _ship(self) -> None:
        """Let MLflow have what is there; in a folder that DVC will delete, wait until it has."""
        if self.repository.shared_home == self.repository.home:
            start_shipper(self.repository)
        else:
            ship_all(self.repository, timeout=SHIP_TIMEOUT_S)

    def _say_end(self, record: Record) -> None:
        taken = seconds(record.ended - record.started)
        self._say(f"done in {taken}: {describe_metrics(record.metrics or {})}")
        for path, digest in record.outs.items():
            self._say(f"  {path}  {digest}")
        for symptom in self.health.of(self.entry.stage, self.entry, now=True):
            self._say(f"warning: {symptom}")

    def _say(self, text: str) -> None:
        self.console.line(f"{self.entry.stage}: {text}")
