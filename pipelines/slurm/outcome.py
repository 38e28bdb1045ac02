"""How a job on Slurm ended, in words: what happened, to which process, and what to do about it."""

import errno
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.ledger.entry import Attempt
from pipelines.ledger.reports import TaskReport
from pipelines.ledger.scheduler_view import SlurmJob
from pipelines.ledger.state import VANISHED, State, TaskState

LOG_TAIL = 20
_LAUNCHER_PREFIX = "submitit "
"""What submitit says of itself, which nobody who reads a stage's log wants."""
_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
_SRUN = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)")
_RESTARTED = re.compile(r"JOB \S+ ON \S+ CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION|NODE)")
_GO_ON = "progress is saved: run the same command to continue"
_FIX = "progress is saved: fix the cause, then run the same command"
_MAKE_ROOM = "free some space, or move the clone, then run the same command: progress is saved"
_KILLED = "if nobody killed it, it ran out of memory: raise `memory` or lower `micro_tokens`"


@dataclass(frozen=True)
class Outcome:
    """Why an attempt ended without its outputs."""

    what: str
    advice: str
    try_again: bool = False
    """Whether the stage goes on by itself in a new job, as far as `requeues` allows."""
    elsewhere: bool = False
    """Whether it does so without nodes that are bad: it had not begun, so no restart is counted."""
    log: str | None = None
    """How the name of the log begins that shows it."""


def outcome_of(attempt: Attempt) -> Outcome:
    """What became of an attempt that Slurm has no more jobs of, or that one of its jobs failed."""
    tasks = attempt.tasks
    failed = [task for task in tasks if task.state is State.FAILED]
    if failed:
        return _of_exception(min(failed, key=lambda task: task.time))
    if off := [task for task in tasks if _left_a_bad_node(attempt, task)]:
        first = min(off, key=lambda task: task.time)
        return Outcome(str(first.error), _GO_ON, try_again=True, elsewhere=True, log=first.log)
    bad = [job for job in attempt.scheduler.jobs.values() if job.state != "COMPLETED"]
    # Of several, those that were ended because of another one say nothing.
    bad.sort(key=lambda job: job.state == "CANCELLED")
    if not bad:
        if any(task.state is TaskState.STOPPED for task in tasks):
            return Outcome("Slurm ended it early", _GO_ON, try_again=True)
        if tasks and all(task.state is TaskState.DONE for task in tasks):
            return Outcome("its shards are done, but not all is there", _GO_ON, try_again=True)
        return Outcome("its job exited without reporting a result", _GO_ON)
    return _of_job(attempt, bad[0])


def outcome_in_session(attempt: Attempt) -> Outcome:
    """What became of an attempt that a session had: without the session, it goes on by itself."""
    result, label = attempt.result, attempt.job
    if result is None:
        if full := no_room(attempt):
            return Outcome(full, _MAKE_ROOM)
        end = attempt.session.result if attempt.session else None
        gone = "exited without reporting a result: killed, or out of memory?"
        what = f"session {label} ended: {end.why}" if end and end.why else f"session {label} {gone}"
        return Outcome(what, _GO_ON, try_again=True)
    return Outcome(result.error or "", _FIX, try_again=result.retryable)


def outcome_here(attempt: Attempt) -> Outcome:
    """What became of an attempt that was a process of this machine."""
    result = attempt.result
    if result and result.error:
        return Outcome(result.error, _FIX)
    if full := no_room(attempt):
        return Outcome(full, _MAKE_ROOM)
    return Outcome("its process exited without reporting a result: killed, or out of memory?", _FIX)


def _left_a_bad_node(attempt: Attempt, task: TaskReport) -> bool:
    """And its job ended by that: one that Slurm has put back since may have been cancelled."""
    job = attempt.scheduler.jobs.get(task.job or "")
    return task.state is TaskState.BAD_NODE and job is not None and job.state == "FAILED"


def _of_exception(task: TaskReport) -> Outcome:
    who = f"{task.what} on {task.host}: " if task.what else ""
    return Outcome(f"{who}{task.error}", _FIX, log=task.log)


def _of_job(attempt: Attempt, job: SlurmJob) -> Outcome:
    name, launch = job.id, attempt.launched
    where = f" on {job.nodes}" if job.nodes else ""
    file = f"slurm_profiles/{launch.profile}.yaml"
    log = f"{name}_"
    match job.state:
        case "TIMEOUT" | "DEADLINE":
            advice = f"raise `time_minutes` or lower `checkpoint_seconds` in {file}"
            what = f"job {name} passed its time limit of {launch.resources.time_minutes} minutes"
            return Outcome(what, advice, try_again=True, log=log)
        case "NODE_FAIL" | "BOOT_FAIL":
            return Outcome(f"job {name} lost its node{where}", _GO_ON, try_again=True, log=log)
        case "PREEMPTED":
            return Outcome(f"job {name} was preempted{where}", _GO_ON, try_again=True, log=log)
        case "OUT_OF_MEMORY":
            memory = launch.resources.memory
            advice = f"raise `memory` ({memory}) or lower `micro_tokens` in {file}"
            return Outcome(f"job {name} ran out of memory{where}", advice, log=log)
        case "CANCELLED":
            if job.reason.startswith("Dependency"):
                what = f"Slurm took job {name} out of the queue: a job that it waits for has failed"
                return Outcome(what, _GO_ON)
            who = f" by {job.by}" if job.by else ""
            what = f"job {name} was cancelled from outside{who} (scancel), not by lockstep"
            return Outcome(what, _GO_ON)
        case _ if job.state == VANISHED:
            lost = "its job" if name == "?" else f"job {name}"
            what = f"{lost} has vanished: Slurm no longer knows it"
            return Outcome(what, _GO_ON, try_again=True)
    if any(task.state is TaskState.STOPPED for task in attempt.tasks):
        what = f"job {name} was ended early by Slurm{where}"
        return Outcome(what, _GO_ON, try_again=True, log=log)
    return _of_process(attempt, job, where)


def _of_process(attempt: Attempt, job: SlurmJob, where: str) -> Outcome:
    """A job that failed although no process of it said why: who went first, as srun saw it."""
    name = job.id
    if full := no_room(attempt):
        return Outcome(f"job {name}{where}: {full}", _MAKE_ROOM)
    lost = [str(task.error) for task in attempt.tasks if task.state is TaskState.LOST_A_RANK]
    lost += [
        word["error"]
        for path in sorted(attempt.folder.glob(f"restarts/{attempt.restarts:03}/failure-*.json"))
        if (word := atomic.read_json(path))
    ]
    for line in _since_restart(attempt, name):
        match = _SRUN.search(line)
        if match and not (lost and "Exited with exit code 1" in match["how"]):
            first = re.split(r"[,\-]", match["tasks"])[0]
            how = match["how"].strip()
            what = f"job {name}: rank {first} on {match['node']}: {how}"
            advice = _KILLED if "Killed" in how else _GO_ON
            return Outcome(
                "; ".join([what, *lost[:1]]),
                advice,
                # Nobody cancelled it, so Slurm has: its warning came before the worker listened.
                try_again="Terminated" in how,
                log=f"{name}_{first}_log",
            )
    if lost:
        return Outcome(f"job {name}: {lost[0]}", _GO_ON)
    code, _, signal = job.exit.partition(":")
    how = f"signal {signal}" if signal not in ("", "0") else f"exit status {code or '?'}"
    advice = _KILLED if signal == "9" or code == "137" else _GO_ON
    if attempt.worker is None:
        advice = "the worker never started: see `setup`, `container` and `python` in the profile"
    return Outcome(f"job {name} ended with {how}{where}", advice)


def no_room(attempt: Attempt) -> str | None:
    """That the disk is full, and where, if it is or the job's log says that it was.

    A job that finds no room for its files cannot even say so.
    """
    if refusal := _refused(attempt.folder / ".room"):
        return f"{refusal}: {attempt.folder}"
    for path in attempt.logs():
        for line in reversed(lines_of(path)):
            if any(words in line for words in _FULL.values()):
                return f"{line.strip()} (in {path})"
    return None


def _refused(probe: Path) -> str | None:
    """What the system says to a small file, where it has no room for it."""
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return _FULL.get(error.errno or 0)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def _since_restart(attempt: Attempt, job: str) -> list[str]:
    """What the job's logs say since Slurm last started it."""
    logs = [path for path in attempt.logs() if path.name.startswith(f"{job}_")]
    lines = [line for path in logs for line in lines_of(path)]
    ends = [number for number, line in enumerate(lines) if _RESTARTED.search(line)]
    return lines[ends[-1] + 1 :] if ends else lines


def tail(attempt: Attempt, outcome: Outcome) -> str:
    """The last lines of the error log of the process that the outcome is about, or of all."""
    logs = [path for path in attempt.logs() if path.name.endswith(".err")]
    if outcome.log is not None:
        logs = [path for path in logs if path.name.startswith(outcome.log)] or logs
    written = [line for path in logs for line in lines_of(path)]
    return "".join(f"  | {line}\n" for line in written[-LOG_TAIL:])


def lines_of(path: Path) -> list[str]:
    """A log without the launcher's lines."""
    text = path.read_text(errors="replace", encoding="utf-8")
    return [line for line in text.splitlines() if not is_launchers(line)]


def is_launchers(line: str) -> bool:
    return line.startswith(_LAUNCHER_PREFIX)
