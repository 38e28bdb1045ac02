"""Agreement of annotators, corrected for chance.

Of each pair, every annotator has said one of several things (the first is better, the second is, a
tie). Cohen's kappa is of two annotators over what both judged; Fleiss' of any number, here also
where pairs have different numbers of judgements. Both are (observed - expected) / (1 - expected),
1 for perfect agreement and 0 for that of chance, and undefined where chance alone agrees always.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

Ratings = Mapping[str, Mapping[str, str]]
"""By pair, then by annotator: what was said."""


@dataclass(frozen=True)
class Cohen:
    """Two annotators."""

    one: str
    other: str
    num_pairs: int
    """That both judged."""
    observed: float
    """The share of them of which both said the same."""
    kappa: float | None


@dataclass(frozen=True)
class Fleiss:
    """All annotators."""

    num_pairs: int
    """That two or more judged."""
    observed: float | None
    """The chance that two judgements of a pair are the same; None: no pair has two."""
    kappa: float | None


def cohens(ratings: Ratings) -> list[Cohen]:
    """Each two annotators that judged a pair in common."""
    annotators = sorted({name for said in ratings.values() for name in said})
    found = (cohen(ratings, *two) for two in combinations(annotators, 2))
    return [each for each in found if each is not None]


def cohen(ratings: Ratings, one: str, other: str) -> Cohen | None:
    both = [(said[one], said[other]) for said in ratings.values() if one in said and other in said]
    if not both:
        return None
    total = len(both)
    observed = sum(a == b for a, b in both) / total
    firsts, seconds = Counter(a for a, _ in both), Counter(b for _, b in both)
    expected = sum(firsts[what] * seconds[what] for what in firsts) / total**2
    return Cohen(one, other, total, observed, _kappa(observed, expected))


def fleiss(ratings: Ratings) -> Fleiss:
    counted = [Counter(said.values()) for said in ratings.values() if len(said) > 1]
    if not counted:
        return Fleiss(0, None, None)
    observed = sum(_agreeing(counts) for counts in counted) / len(counted)
    overall = sum(counted, Counter[str]())
    expected = sum((number / overall.total()) ** 2 for number in overall.values())
    return Fleiss(len(counted), observed, _kappa(observed, expected))


def _agreeing(counts: Counter[str]) -> float:
    """The share of a pair's judgements, two by two, that are the same."""
    return sum(comb(number, 2) for number in counts.values()) / comb(counts.total(), 2)


def _kappa(observed: float, expected: float) -> float | None:
    return None if expected == 1 else (observed - expected) / (1 - expected)


def as_json(values: Iterable[Cohen]) -> list[dict[str, Any]]:
    return [vars(value) for value in values]
