"""The table of `lockstep cost`: in GPU-hours where any GPU was had, else in CPU-hours."""

from collections.abc import Callable

from pipelines.ledger.costs import Amount, Cost, Peak
from pipelines.runs.cost import Bill

_GIB = 1 << 30
_TOTAL = "total"


def render(bill: Bill) -> str:
    if not bill.lines:
        return "no job of this clone took anything in this time"
    on_gpus = bill.total.held.gpu_hours > 0
    unit: Callable[[Amount], float] = _gpu_hours if on_gpus else _cpu_hours
    what = "GPU-hours" if on_gpus else "CPU-hours"
    head = [bill.by.value, "attempts", what, "computed", "lost"]
    head += ["CPU-hours"] if on_gpus else []
    head += ["hours run", "waited", "memory"]
    head += ["GPU memory", "GPU busy"] if on_gpus else []
    costs = [(line.name, line.cost) for line in bill.lines]
    if len(costs) > 1:
        costs.append((_TOTAL, bill.total))
    rows = [head]
    for name, cost in costs:
        row = [name, str(cost.attempts), *map(hours, map(unit, _parts(cost)))]
        row += [hours(cost.held.cpu_hours)] if on_gpus else []
        row += [hours(cost.held.hours), hours(cost.waited.hours), _gib(cost.peak.memory_bytes)]
        row += [_gib(cost.peak.gpu_memory_bytes), _percent(cost.peak)] if on_gpus else []
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_notes(bill.total, unit, what)])


def in_words(cost: Cost) -> str:
    """Of one stage: what it held, and what of that is lost."""
    on_gpus = cost.held.gpu_hours > 0
    unit = _gpu_hours if on_gpus else _cpu_hours
    lost = f", {hours(unit(cost.lost))} lost" if unit(cost.lost) else ""
    return f"{hours(unit(cost.held))} {'GPU' if on_gpus else 'CPU'}-hours{lost}"


def hours(number: float) -> str:
    """Two digits after the point; not 0 where there is something."""
    if 0 < number < 0.005:
        return "<0.01"
    return f"{number:,.2f}" if number else "0"


def lost_by_reason(cost: Cost, unit: Callable[[Amount], float]) -> str:
    """The reasons with the largest share first."""
    parts = sorted(cost.reasons.items(), key=lambda part: -unit(part[1]))
    return ", ".join(f"{hours(unit(amount))} {reason}" for reason, amount in parts)


def _notes(total: Cost, unit: Callable[[Amount], float], what: str) -> list[str]:
    notes = []
    if total.reasons:
        notes.append(f"lost, in {what}: {lost_by_reason(total, unit)}")
    if total.waited_again.hours:
        notes.append(f"waited to start again: {hours(total.waited_again.hours)} hours")
    if total.estimated:
        attempts = "1 attempt" if total.estimated == 1 else f"{total.estimated} attempts"
        notes.append(f"{attempts} without readings: estimated from other files")
    return notes


def _parts(cost: Cost) -> tuple[Amount, Amount, Amount]:
    return cost.held, cost.computed, cost.lost


def _gpu_hours(amount: Amount) -> float:
    return amount.gpu_hours


def _cpu_hours(amount: Amount) -> float:
    return amount.cpu_hours


def _gib(number: int | None) -> str:
    return "" if number is None else f"{number / _GIB:.1f} GiB"


def _percent(peak: Peak) -> str:
    return "" if peak.gpu_busy_percent is None else f"{peak.gpu_busy_percent:.0f} %"
