"""Sums of spans: GPU-hours, CPU-hours and hours, computed, lost and waited for."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipelines.ledger.spans import AGAIN, Kind, Span

HOUR_S = 3600.0


@dataclass(frozen=True)
class Amount:
    """Time of jobs, in hours, and what they had during it."""

    hours: float = 0.0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.hours + other.hours,
            self.gpu_hours + other.gpu_hours,
            self.cpu_hours + other.cpu_hours,
        )


@dataclass(frozen=True)
class Peak:
    """The most that was seen at once on one node, and how busy its GPUs were."""

    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_busy_percent: float | None = None
    gpu_readings: int = 0

    def __or__(self, other: "Peak") -> "Peak":
        """Of both: the larger ones, and the mean over all readings."""
        count = self.gpu_readings + other.gpu_readings
        weighed = [(each.gpu_busy_percent or 0.0) * each.gpu_readings for each in (self, other)]
        return Peak(
            _larger(self.memory_bytes, other.memory_bytes),
            _larger(self.gpu_memory_bytes, other.gpu_memory_bytes),
            round(sum(weighed) / count, 1) if count else None,
            count,
        )


@dataclass(frozen=True)
class Cost:
    """What something took. What was held is what was computed and what was lost."""

    computed: Amount = Amount()
    lost: Amount = Amount()
    waited: Amount = Amount()
    """Nobody else went without: GPU-hours here are hours in which as many were waited for."""
    waited_again: Amount = Amount()
    """The part of it before starts that went on from earlier ones."""
    reasons: Mapping[str, Amount] = field(default_factory=dict)
    """What is lost, by why."""
    attempts: int = 0
    estimated: int = 0
    """Attempts that noted nothing themselves: what else is known of them was taken."""
    peak: Peak = Peak()

    @property
    def held(self) -> Amount:
        return self.computed + self.lost

    @property
    def took_anything(self) -> bool:
        return any(each.hours for each in (self.computed, self.lost, self.waited))

    def __add__(self, other: "Cost") -> "Cost":
        names = sorted({*self.reasons, *other.reasons})
        none = Amount()
        return Cost(
            self.computed + other.computed,
            self.lost + other.lost,
            self.waited + other.waited,
            self.waited_again + other.waited_again,
            {name: self.reasons.get(name, none) + other.reasons.get(name, none) for name in names},
            self.attempts + other.attempts,
            self.estimated + other.estimated,
            self.peak | other.peak,
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "held": asdict(self.held)}


def clipped(spans: Iterable[Span], since: float, until: float) -> list[Span]:
    """What of them lies between two times."""
    within = (
        replace(span, begin=max(span.begin, since), end=min(span.end, until)) for span in spans
    )
    return [span for span in within if span.end > span.begin]


def cost_of(spans: Iterable[Span]) -> Cost:
    """Their sum; attempts and peaks are counted by whoever knows of them."""
    total = Cost()
    for span in spans:
        hours = span.seconds / HOUR_S
        amount = Amount(hours, hours * span.gpus, hours * span.cores)
        match span.kind:
            case Kind.COMPUTED:
                total = replace(total, computed=total.computed + amount)
            case Kind.LOST:
                reasons = dict(total.reasons)
                reasons[span.reason] = reasons.get(span.reason, Amount()) + amount
                total = replace(total, lost=total.lost + amount, reasons=reasons)
            case Kind.WAITED:
                again = amount if span.reason == AGAIN else Amount()
                total = replace(
                    total,
                    waited=total.waited + amount,
                    waited_again=total.waited_again + again,
                )
    return total


def _larger(one: int | None, other: int | None) -> int | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, default=None)
