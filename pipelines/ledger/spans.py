"""What an entry took, as spans of time: each one waited, computed or lost, with GPUs and cores.

A pure function of what is known of its jobs. Always true:
- A job holds its nodes from its start to its end, whatever it does there; each job of an array and
  each start of a job counts.
- Lost is what did not help the stage to its end: of a start that was killed or failed what came
  after it last saved something, of every later start the time until its stage began again, and
  of an entry that ended without outputs all. A later attempt that completes it takes that back.
- No length is a difference between two clocks but that of a wait, which is never below 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    WAITED = "waited"
    """For nodes, or for a session; GPUs and cores are those that were waited for."""
    COMPUTED = "computed"
    LOST = "lost"


class End(StrEnum):
    """How a start of a job ended, and so why time of it is lost."""

    RUNS = "running"
    DONE = "done"
    STOPPED = "stopped"
    """It was told to, and had saved before."""
    REQUEUED = "requeued"
    """It was killed, and Slurm has put it back into the queue."""
    KILLED = "killed"
    CANCELLED = "cancelled"
    FAILED = "failed"


AGAIN = "starting again"
"""Why time is lost of a start that went on from an earlier one."""
_CUT_OFF = (End.REQUEUED, End.KILLED, End.CANCELLED, End.FAILED)
"""Ends before which nothing was saved on purpose."""


@dataclass(frozen=True)
class Start:
    """One time that a job had its nodes."""

    begin: float
    seconds: float
    end: End
    start_up: float | None = None
    """Seconds until its stage began; None where it did not come to that."""
    saved: float | None = None
    """Seconds until it last saved something."""


@dataclass(frozen=True)
class Job:
    """A job of a submission, or a task of an array; its starts in their order."""

    gpus: int
    cores: int
    starts: tuple[Start, ...]
    waits_since: float | None = None
    """From when on it was in the queue; None of a job that no one else decides about."""
    waits_until: float | None = None
    """Of a job that waits for its next start, now; of one that left the queue, when it did."""


class Fate(StrEnum):
    """What became of an entry so far."""

    COMPLETED = "completed"
    GOES_ON = "goes on"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Span:
    kind: Kind
    begin: float
    end: float
    gpus: int
    cores: int
    reason: str = ""
    """Of what is lost: why. Of what was waited: whether for a start again."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def spans_of(attempts: Sequence[Sequence[Job]], fate: Fate) -> list[list[Span]]:
    """The spans of each attempt of an entry, from its jobs; the attempts in their order."""
    found, begun = [], False
    for jobs in attempts:
        found.append([span for job in jobs for span in _of_job(job, fate, again=begun)])
        begun = begun or any(job.starts for job in jobs)
    return found


def _of_job(job: Job, fate: Fate, *, again: bool) -> Iterator[Span]:
    since = job.waits_since
    for start in job.starts:
        if since is not None:
            yield from _wait(job, since, start.begin, again=again)
            since = start.begin + start.seconds
        yield from _of_start(job, start, fate, again=again)
        again = True
    if since is not None and job.waits_until is not None:
        yield from _wait(job, since, job.waits_until, again=again)


def _wait(job: Job, since: float, until: float, *, again: bool) -> Iterator[Span]:
    if until > since:
        reason = AGAIN if again else ""
        yield Span(Kind.WAITED, since, until, job.gpus, job.cores, reason)


def _of_start(job: Job, start: Start, fate: Fate, *, again: bool) -> Iterator[Span]:
    whole = max(start.seconds, 0.0)
    if fate in (Fate.FAILED, Fate.CANCELLED):
        bad = start.end if start.end in _CUT_OFF else fate
        parts = [(whole, bad.value)]
    else:
        up_to = whole
        if start.end in _CUT_OFF:
            up_to = min(max(start.saved or 0.0, 0.0), whole)
        # One that has not come to its stage was only starting.
        start_up = up_to if start.start_up is None else max(start.start_up, 0.0)
        begun = min(start_up, up_to) if again else 0.0
        parts = [(begun, AGAIN), (up_to - begun, ""), (whole - up_to, start.end.value)]
    begin = start.begin
    for seconds, reason in parts:
        if seconds > 0:
            kind = Kind.LOST if reason else Kind.COMPUTED
            yield Span(kind, begin, begin + seconds, job.gpus, job.cores, reason)
        begin += seconds
