"""`lockstep cost`: what the jobs of this clone took, summed by stage, time or whoever asked.

Everything is read off the ledger, so it needs no accounting of Slurm's, and knows the jobs whose
folders in `.lockstep/jobs` are there. A job that lasts over a border of days counts on both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.ledger.costs import Cost
from pipelines.ledger.entry import Entry, Ledger
from pipelines.runs.cost_by import PERIODS, By, periods
from pipelines.runs.session_cost import spent_idle
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.spent import Spent, spent_by

NOTHING = "-"
FOREVER = float("inf")


@dataclass(frozen=True)
class Line:
    name: str
    cost: Cost

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **self.cost.as_json()}


@dataclass(frozen=True)
class Bill:
    by: By
    lines: list[Line]
    total: Cost

    def as_json(self) -> dict[str, Any]:
        return {
            "by": self.by.value,
            "lines": [line.as_json() for line in self.lines],
            "total": self.total.as_json(),
        }


@dataclass(frozen=True)
class Item:
    """What one attempt took, or a session while it was idle, with what it may be listed under."""

    stage: str
    """Its address, rollout@iter_001."""
    names: dict[By, str]
    cost: Callable[[float, float], Cost]
    begin: float
    """When it first waited or ran."""
    end: float


def look(repository: Repository, now: float) -> list[Item]:
    """Every attempt in the ledger and every session, up to now."""
    Scheduler(repository).refresh()
    entries = Ledger(repository.jobs).entries()
    spent = [(entry, each) for entry in entries for each in spent_by(entry, now)]
    items = [_of_attempt(entry, each) for entry, each in spent if each.spans]
    for idle in spent_idle(repository, [each for _, each in spent], now):
        name = f"session {idle.name}"
        shared = dict.fromkeys(By, NOTHING)
        names = {**shared, By.STAGE: name, By.ATTEMPT: name, By.PROFILE: idle.profile}
        begin, end = idle.spans[0].begin, idle.spans[-1].end
        items.append(Item(name, names, idle.cost, begin, end))
    return items


def only(items: Sequence[Item], stages: Sequence[str]) -> list[Item]:
    """Those of these stages; `rollout` stands for that of every iteration."""
    chosen = [
        item for item in items if item.stage in stages or item.stage.partition("@")[0] in stages
    ]
    if not chosen:
        known = ", ".join(sorted({item.stage for item in items})) or "none"
        raise LockstepError(f"no job of {', '.join(stages)} is known here; there are: {known}")
    return chosen


def sum_up(items: Sequence[Item], by: By, since: float, now: float) -> Bill:
    """A line for each stage, day or the like that took anything since then, in order.

    An attempt that goes on over midnight is one of both days, and one in the total.
    """
    sums: dict[str, Cost] = {}
    if by in PERIODS:
        begin = max(since, min((item.begin for item in items), default=now))
        # A node whose clock is ahead of ours tells of times that are yet to come.
        end = max(now, *(item.end for item in items)) if items else now
        for name, first, last in periods(by, begin, end):
            sums[name] = _sum(items, max(first, since), last)
    else:
        for item in items:
            name = item.names[by]
            sums[name] = sums.get(name, Cost()) + item.cost(since, FOREVER)
    lines = [Line(name, cost) for name, cost in sums.items() if cost.took_anything]
    return Bill(by, lines, _sum(items, since, FOREVER))


def _sum(items: Sequence[Item], since: float, until: float) -> Cost:
    return sum((item.cost(since, until) for item in items), Cost())


def _of_attempt(entry: Entry, spent: Spent) -> Item:
    launch, origin = spent.launch, entry.origin
    name, _, key = entry.stage.partition("@")
    asked = launch.invocation or origin.invocation
    names = dict.fromkeys(By, NOTHING) | {
        By.STAGE: name,
        By.ITERATION: key or NOTHING,
        By.ATTEMPT: f"{entry.stage} {entry.folder.name}/{spent.attempt.number:03}",
        By.PROFILE: launch.profile,
        By.PIPELINE: f"{asked.command} ({asked.id})",
        By.EXPERIMENT: origin.experiment or NOTHING,
    }
    begin = min(span.begin for span in spent.spans)
    return Item(entry.stage, names, spent.cost, begin, max(span.end for span in spent.spans))
