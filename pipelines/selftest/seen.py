"""What the ranks of a self-test have measured, and what all findings about it share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.selftest.finding import Finding, Verdict
from pipelines.selftest.settings import Measurement

SEE_LOG = "see the logs in the folder below"
OK, SLOW, FAILED = Verdict.OK, Verdict.SLOW, Verdict.FAILED
SLOWEST_SHARE = 0.8
"""A rank or node that reaches less of the others' median is named."""


@dataclass(frozen=True)
class Seen:
    """All that is judged."""

    measured: Mapping[str, Sequence[Measurement]]
    resources: Resources
    executor: ExecutorKind
    collective_seconds: float
    """The time limit of collectives in the job."""

    @property
    def world(self) -> int:
        return self.resources.nodes * self.resources.tasks_per_node

    @property
    def on_gpus(self) -> bool:
        return self.resources.device != "cpu"

    def values(self, check: str) -> list[tuple[Measurement, dict[str, Any]]]:
        return [(each, each.values) for each in self.measured.get(check, ())]

    def of_first(self, check: str) -> dict[str, Any]:
        return self.measured[check][0].values


Judge = Callable[[Seen], Iterator[Finding]]


def slow_ones(rates: Sequence[tuple[str, float]], share: float = SLOWEST_SHARE) -> list[str]:
    """Who is well below the others' median, with how far."""
    if len(rates) < 2:
        return []
    middle = median(rate for _, rate in rates)
    return [
        f"{who} {rate:.3g} ({rate / middle:.0%} of the median)"
        for who, rate in rates
        if rate < share * middle
    ]


def by_node(seen: Seen, check: str) -> dict[str, dict[str, Any]]:
    """The first rank's values of each node."""
    nodes: dict[str, dict[str, Any]] = {}
    for each, values in seen.values(check):
        nodes.setdefault(each.node, values)
    return nodes


def few(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
