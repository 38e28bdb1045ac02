"""What sessions took while they ran no stage: they keep their GPUs, whether or not they are used.

While one runs a stage, its time is that stage's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipelines.base.repository import Repository
from pipelines.ledger.costs import Cost, clipped, cost_of
from pipelines.ledger.spans import Kind, Span
from pipelines.slurm.spent import Spent
from pipelines.worker.session import Session

IDLE = "idle session"


@dataclass(frozen=True)
class IdleSession:
    """One start of a session that was idle at times."""

    name: str
    profile: str
    spans: tuple[Span, ...]

    def cost(self, since: float, until: float) -> Cost:
        return cost_of(clipped(self.spans, since, until))


def spent_idle(repository: Repository, spent: Iterable[Spent], now: float) -> list[IdleSession]:
    """Every start of every session, less what it was at work for an attempt."""
    work: dict[str, list[Span]] = {}
    for each in spent:
        if each.launch.session:
            held = [span for span in each.spans if span.kind is not Kind.WAITED]
            work.setdefault(str(each.launch.session), []).extend(held)
    found = []
    for path in sorted((repository.home / "sessions").glob("*/[0-9]*/launch.json")):
        session = Session(path.parent)
        spans = tuple(_idle(session, work.get(str(path.parent), []), now))
        if spans:
            found.append(IdleSession(session.label, session.launch.profile, spans))
    return found


def _idle(session: Session, work: Sequence[Span], now: float) -> Iterator[Span]:
    worker, result, beat = session.host.worker, session.host.result, session.heartbeat
    if worker is None:
        return
    launch = session.launch
    if session.host.state().alive:
        end = now
    else:
        end = (result and result.ended) or (beat.time if beat else worker.time)
    gpus, cores = launch.gpus_per_job, launch.cores_per_job
    at = worker.time
    for begin, after in [*sorted((span.begin, span.end) for span in work), (end, end)]:
        if min(begin, end) > at:
            yield Span(Kind.LOST, at, min(begin, end), gpus, cores, IDLE)
        at = max(at, after)
