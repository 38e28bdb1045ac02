"""What the jobs of an entry took: read off what its processes noted, and else off other files.

An attempt without notes, by an earlier Lockstep or one whose worker never came to write any, is
estimated: from how long Slurm says that its jobs have run, or from its first and last word. Nothing
here asks Slurm; whoever wants the newest word of it refreshes the scheduler's view before.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipelines.ledger.costs import Cost, Peak, clipped, cost_of
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.launch import Launch
from pipelines.ledger.scheduler_view import SlurmJob
from pipelines.ledger.spans import End, Fate, Job, Span, Start, spans_of
from pipelines.ledger.state import WAITING, State, TaskState
from pipelines.ledger.usage import Usage, usages_of
from pipelines.slurm import link

LATEST_READING_S = 60.0
"""A process that runs has taken a reading since; of one that is halted, no more is counted."""
_ALONE = ""
"""Of a job without Slurm, instead of a number."""
_ENDS = {
    State.COMPLETED: End.DONE,
    TaskState.DONE: End.DONE,
    TaskState.STOPPED: End.STOPPED,
    # By its own word, it has saved first.
    State.CANCELLED: End.STOPPED,
    State.FAILED: End.FAILED,
    TaskState.LOST_A_RANK: End.KILLED,
    TaskState.BAD_NODE: End.KILLED,
}
_WORST_FIRST = (End.FAILED, End.RUNS, End.STOPPED, End.KILLED, End.DONE)
"""Of the processes of one job: which of their ends is the job's."""


@dataclass(frozen=True)
class Spent:
    """One attempt: when its jobs waited, computed and lost time."""

    attempt: Attempt
    launch: Launch
    spans: tuple[Span, ...]
    peak: Peak
    estimated: bool

    def cost(self, since: float = float("-inf"), until: float = float("inf")) -> Cost:
        """What it took between two times; as far as that goes, it counts as an attempt."""
        within = clipped(self.spans, since, until)
        if not within:
            return Cost()
        estimated = int(self.estimated)
        return replace(cost_of(within), attempts=1, estimated=estimated, peak=self.peak)


def cost_of_entry(entry: Entry) -> Cost:
    return sum((each.cost() for each in spent_by(entry)), Cost())


def spent_by(entry: Entry, now: float | None = None) -> list[Spent]:
    """Every attempt that was launched, oldest first; one that goes on counts up to now."""
    now = time.time() if now is None else now
    launched = [(each, launch) for each in entry.attempts() if (launch := each.launch)]
    if not launched:
        return []
    readings = [usages_of(attempt) for attempt, _ in launched]
    jobs = [
        _jobs(attempt, launch, usages, now)
        for (attempt, launch), usages in zip(launched, readings, strict=True)
    ]
    spans = spans_of(jobs, _fate(entry))
    return [
        Spent(
            attempt,
            launch,
            tuple(its),
            _peak(usages),
            estimated=not usages and any(job.starts for job in own),
        )
        for (attempt, launch), usages, own, its in zip(launched, readings, jobs, spans, strict=True)
    ]


def _fate(entry: Entry) -> Fate:
    state = entry.state()
    if state.alive:
        return Fate.GOES_ON
    if state in (State.COMPLETED, State.PUBLISHED):
        return Fate.COMPLETED
    return Fate.CANCELLED if state is State.CANCELLED else Fate.FAILED


def _jobs(attempt: Attempt, launch: Launch, usages: Sequence[Usage], now: float) -> list[Job]:
    state = attempt.state()
    seen = attempt.scheduler.jobs if attempt.on_slurm else {}
    names = sorted({usage.job or _ALONE for usage in usages} | set(seen)) or [_ALONE]
    queues = attempt.on_slurm or launch.session is not None
    since = _queued_since(attempt, launch) if queues else None
    jobs = []
    for name in names:
        job = seen.get(name)
        own = [usage for usage in usages if (usage.job or _ALONE) == name]
        alive = state.alive and not (job and job.ended)
        if own:
            starts = _starts(attempt, own, job, alive=alive, now=now)
        elif not usages or (job and job.used):
            starts = _estimated(attempt, launch, job, state, now)
        else:
            starts = []  # the others of its array have noted something, and it never ran
        waits = job.state in WAITING if job else not starts
        until = now if alive and waits else None
        if not starts and not alive:
            until = _left_queue(attempt)
        jobs.append(Job(launch.gpus_per_job, launch.cores_per_job, tuple(starts), since, until))
    return jobs


def _queued_since(attempt: Attempt, launch: Launch) -> float | None:
    """When nothing but nodes was missing: a link of a chain waits for those before it first."""
    folder = attempt.folder.resolve()
    if not link.is_link(folder):
        return launch.time or None
    inputs = [artifact.path for artifact in attempt.entry.spec.inputs.values()]
    ends = [launch.time]
    if earlier := link.Link(folder).predecessor:
        # Until then it was only there in case of that end.
        ends += [usage.begun + usage.seconds for usage in usages_of(earlier.attempt)]
    for other in folder.parent.iterdir():
        entry = link.resolved(other)
        made = entry.spec.outs.values() if entry and other != folder else ()
        if entry and any(
            out == path or out.startswith(f"{path}/") for out in made for path in inputs
        ):
            ends += [each.ended for each in [entry.attempts()[-1].result] if each and each.ended]
    return max(ends)


def _starts(
    attempt: Attempt, usages: Sequence[Usage], job: SlurmJob | None, *, alive: bool, now: float
) -> list[Start]:
    """The starts of one job, from what its processes noted."""
    restarts = sorted({usage.restart for usage in usages})
    starts = []
    for restart in restarts:
        its = [usage for usage in usages if usage.restart == restart]
        last = restart == restarts[-1]
        # Back in the queue, it runs no more.
        runs = alive and last and not (job and job.state in WAITING)
        end = _end(its, attempt, runs=runs, last=last and not alive)
        seconds = max(usage.seconds for usage in its)
        if end is End.RUNS:
            silence = now - max(usage.begun + usage.seconds for usage in its)
            seconds += min(max(silence, 0.0), LATEST_READING_S)
        begin = min(usage.begun for usage in its)
        if last and job and job.ended and attempt.scheduler.ended and job.used is not None:
            # Before its processes came to note anything, the job had its nodes, too.
            before = max(job.used - seconds, 0.0)
            begin, seconds = begin - before, seconds + before
            its = [_later(usage, before) for usage in its]
        starts.append(
            Start(
                begin=begin,
                seconds=seconds,
                end=end,
                start_up=_latest(usage.start_up for usage in its),
                saved=_latest(usage.saved for usage in its),
            )
        )
    return starts


def _latest(times: Iterable[float | None]) -> float | None:
    return max((each for each in times if each is not None), default=None)


def _later(usage: Usage, before: float) -> Usage:
    """With seconds counted from when the job got its nodes."""
    start_up, saved = (None if x is None else x + before for x in (usage.start_up, usage.saved))
    return replace(usage, start_up=start_up, saved=saved)


def _end(usages: Sequence[Usage], attempt: Attempt, *, runs: bool, last: bool) -> End:
    cut_off = End.RUNS if runs else End.KILLED
    ends = {_ENDS[usage.state] if usage.state else cut_off for usage in usages}
    end = next(end for end in _WORST_FIRST if end in ends)
    if end is not End.KILLED:
        return end
    if not last:
        return End.REQUEUED
    return End.CANCELLED if attempt.was_cancelled else End.KILLED


def _estimated(
    attempt: Attempt, launch: Launch, job: SlurmJob | None, state: State, now: float
) -> list[Start]:
    """The one start that is known of a job whose processes noted nothing."""
    worker, result = attempt.worker, attempt.result
    if job and job.used is not None:
        begin, seconds = worker.time if worker else launch.time, job.used
    elif worker:
        ended = (result and result.ended) or (now if state.alive else _last_change(attempt))
        begin, seconds = worker.time, max(ended - worker.time, 0.0)
    else:
        return []
    if job and job.state == "COMPLETED":
        end = End.DONE
    elif result:
        end = _ENDS.get(result.state, End.KILLED)
    else:
        end = End.RUNS if state.alive and not (job and job.ended) else End.KILLED
    return [Start(begin, seconds, end, start_up=0.0)] if seconds else []


def _left_queue(attempt: Attempt) -> float | None:
    """When a job that never started was taken out of the queue."""
    if attempt.was_cancelled:
        with suppress(OSError):
            return (attempt.folder / "cancelled.json").stat().st_mtime
    return attempt.scheduler.ended_since


def _last_change(attempt: Attempt) -> float:
    times = [0.0]
    for path in attempt.folder.iterdir():
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _peak(usages: Sequence[Usage]) -> Peak:
    """Of the node and start with the most; GPUs by all that read them."""
    nodes: dict[tuple[str | None, int, str], int] = {}
    peak = Peak()
    for usage in usages:
        key = (usage.job, usage.restart, usage.host)
        nodes[key] = nodes.get(key, 0) + usage.memory_peak
        gpus = Peak(None, usage.gpu_memory_peak, usage.gpu_busy, usage.gpu_readings)
        peak |= gpus
    return replace(peak, memory_bytes=max(nodes.values(), default=0) or None)
