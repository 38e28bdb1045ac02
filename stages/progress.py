"""How far a stage is: what it counts, how fast, and how long it still takes.

A stage counts one thing at a time, its phase. The rate is that of the latest reports in this phase
by this process: what came before the first of them (imports, loading, compiling, the steps of an
earlier start of the job) says nothing about the time that is left. So with the first report there
is no rate yet.

The log gets a line for the first report of a phase, for its last, and at most one for each percent
between, so that no job fills its log, however long it runs.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REPORT_S = 0.5
"""The shortest time between two reports in a phase."""
LINE_S = 10.0
"""The shortest time between two lines in the log."""
LINES = 100
WINDOW = 64
"""How many reports the rate is taken over."""


@dataclass
class Pace:
    """The reports of one process."""

    _phase: str = ""
    _reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """When so many were done."""
    _line: tuple[float, int] = (0.0, 0)
    """The latest report that got a line."""

    def report(
        self, done: int, total: int, phase: str, numbers: Mapping[str, float]
    ) -> dict[str, Any] | None:
        """What to say of it; None so soon after the last report."""
        now = time.monotonic()
        if phase != self._phase or (self._reports and done < self._reports[-1][1]):
            self._phase = phase
            self._reports.clear()
        first = not self._reports
        if not first and done < total and now - self._reports[-1][0] < REPORT_S:
            return None
        self._reports.append((now, done))
        return {
            "phase": phase,
            "done": done,
            "total": total,
            "rate": self._rate(),
            "numbers": dict(numbers),
            "time": time.time(),
        }

    def line(self, report: Mapping[str, Any]) -> str | None:
        """The line that the log gets for this report, if it gets one."""
        (now, done), total = self._reports[-1], report["total"]
        at, before = self._line
        soon = now - at < LINE_S or done - before < total / LINES
        if len(self._reports) > 1 and done < total and soon:
            return None
        self._line = (now, done)
        return describe(report)

    def _rate(self) -> float | None:
        (then, before), (now, done) = self._reports[0], self._reports[-1]
        return (done - before) / (now - then) if done > before and now > then else None


def describe(report: Mapping[str, Any]) -> str:
    """What is counted, how far it is, its rate, the time left and the numbers that matter."""
    done, total, rate = report["done"], report["total"], report["rate"]
    parts = [f"{report['phase']} {done}/{total}".strip()]
    if rate:
        parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{seconds(1 / rate)} each")
        if done < total:
            parts.append(f"{seconds((total - done) / rate)} left")
    parts += [f"{name} {value:.4g}" for name, value in report["numbers"].items()]
    return "  ".join(parts)


def seconds(value: float) -> str:
    """A duration as people say it; one across which the clock was set back is none."""
    value = max(value, 0.0)
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
