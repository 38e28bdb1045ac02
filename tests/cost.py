"""What the tests cost: seconds by folder, the slowest ten, and what this machine could not run.

CONTRIBUTING.md says what each folder may take. One that takes half as much again is named at the
end: a warning for whoever changed it, not a failure, because machines differ.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GROWN = 1.5
SLOWEST = 10
_ROW = re.compile(r"\| `tests/(?P<folder>\w+)` \| (?P<seconds>\d+) \|")


def limits(text: str) -> dict[str, int]:
    """Seconds that each folder may take, from the table in CONTRIBUTING.md."""
    return {row["folder"]: int(row["seconds"]) for row in _ROW.finditer(text)}


def seconds_by_test(reports: Iterable[Any]) -> dict[str, float]:
    """Set-up, test and clean-up together."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if hasattr(report, "duration"):
            seconds[report.nodeid] += report.duration
    return dict(seconds)


def describe(seconds: Mapping[str, float], allowed: Mapping[str, int]) -> list[str]:
    """The table, its warnings, and the slowest tests."""
    folders: dict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for nodeid, taken in seconds.items():
        folder = Path(nodeid.partition("::")[0]).parent.name
        folders[folder] += taken
        count[folder] += 1
    lines = []
    for folder, taken in sorted(folders.items(), key=lambda item: -item[1]):
        limit = allowed.get(folder)
        may = f"of {limit:>5} s" if limit else "no limit is written down"
        grown = "  GROWN BY HALF" if limit and taken > GROWN * limit else ""
        lines.append(f"{taken:8.0f} s {may}  tests/{folder} ({count[folder]} tests){grown}")
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    return [*lines, "", *(f"{taken:8.1f} s  {nodeid}" for nodeid, taken in slowest)]


def not_run(reports: Iterable[Any]) -> list[str]:
    """What was skipped, a line for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reports
        if isinstance(getattr(report, "longrepr", None), tuple)
    )
    return [f"{number:8} not run here: {reason}" for reason, number in reasons.most_common()]


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """At the end of a run over whole folders; of a choice of tests, only what was not run."""
    stats = terminalreporter.stats
    reports = [report for name in stats for report in stats[name]]
    seconds = seconds_by_test(reports)
    if not seconds or config.option.collectonly:
        return
    whole = not (config.option.keyword or config.option.markexpr)
    contributing = Path(config.rootpath) / "CONTRIBUTING.md"
    allowed = limits(contributing.read_text(encoding="utf-8")) if whole else {}
    if len(seconds) > SLOWEST:
        terminalreporter.section("seconds by folder, summed over processes; the slowest tests")
        for line in describe(seconds, allowed):
            terminalreporter.write_line(line)
    for line in not_run(stats.get("skipped", ())):
        terminalreporter.write_line(line)
