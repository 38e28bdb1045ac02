"""Agreement of two scorings of the same responses.

Different means and spreads do no harm: a policy learns from which of a prompt's responses is
better. So pairs of responses to the same prompt are counted too: those that the two scorings order
differently, and those that only one of them ties.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Place = tuple[Any, ...]
"""Identifies a response: its prompt's id, then what distinguishes it from the prompt's others."""


@dataclass(frozen=True)
class Agreement:
    """Two scorings side by side."""

    num_rows: int
    mean_one: float
    mean_other: float
    std_one: float
    std_other: float
    pearson: float | None
    """None where one of the two is constant."""
    spearman: float | None
    num_pairs: int
    """Of responses to one prompt."""
    num_reversed: int
    """Pairs that the two order differently."""
    num_tied_in_one: int
    """Pairs that exactly one of the two ties."""

    @property
    def mean_difference(self) -> float:
        return self.mean_other - self.mean_one

    @property
    def reversed_share(self) -> float | None:
        return self.num_reversed / self.num_pairs if self.num_pairs else None

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "mean_difference": self.mean_difference,
            "reversed_share": self.reversed_share,
        }


def compare(one: Mapping[Place, float], other: Mapping[Place, float]) -> Agreement:
    """Two scorings of the same places."""
    places = sorted(one)
    a, b = [one[place] for place in places], [other[place] for place in places]
    groups: dict[Any, list[Place]] = defaultdict(list)
    for place in places:
        groups[place[0]].append(place)
    signs = [
        (_sign(one[x] - one[y]), _sign(other[x] - other[y]))
        for group in groups.values()
        for x, y in combinations(group, 2)
    ]
    return Agreement(
        num_rows=len(places),
        mean_one=statistics.fmean(a),
        mean_other=statistics.fmean(b),
        std_one=statistics.pstdev(a),
        std_other=statistics.pstdev(b),
        pearson=correlation(a, b),
        spearman=correlation(ranks(a), ranks(b)),
        num_pairs=len(signs),
        num_reversed=sum(x * y < 0 for x, y in signs),
        num_tied_in_one=sum((x == 0) != (y == 0) for x, y in signs),
    )


def largest(one: Mapping[Place, float], other: Mapping[Place, float], count: int) -> list[Place]:
    """The places where the two differ most, largest difference first; none that agree."""
    apart = [place for place in sorted(one) if one[place] != other[place]]
    return sorted(apart, key=lambda place: -abs(other[place] - one[place]))[:count]


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None where one of the two is constant."""
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    off_a, off_b = [x - mean_a for x in a], [y - mean_b for y in b]
    size = math.sqrt(math.fsum(x * x for x in off_a) * math.fsum(y * y for y in off_b))
    if size == 0:
        return None
    product = math.fsum(x * y for x, y in zip(off_a, off_b, strict=True))
    return max(-1.0, min(1.0, product / size))


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; ties share their mean rank."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranked = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranked[order[position]] = (start + end) / 2 + 1
        start = end + 1
    return ranked


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
