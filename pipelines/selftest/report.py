"""The report of a self-test: a page for people, and the same as JSON.

`report.json` has a version; whoever reads it finds there the verdict, the findings in the order of
the page, and all that was measured, by check and rank.
"""

import json
import math
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipelines.base import atomic
from pipelines.base.console import seconds
from pipelines.selftest.finding import Finding, Verdict, worst
from pipelines.selftest.settings import Measurement

WIDTH = 110


@dataclass(frozen=True)
class Report:
    """How a self-test went."""

    VERSION: ClassVar[int] = 1

    profile: str
    stage: str
    """Whose resources the job had."""
    job: str
    nodes: int
    ranks: int
    time: float
    """When it was submitted."""
    seconds: float
    """What it took, the wait in the queue included."""
    folder: Path
    findings: list[Finding]
    measured: Mapping[str, list[Measurement]]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def exit_status(self) -> int:
        return 1 if self.verdict is Verdict.FAILED else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.VERSION,
            "verdict": str(self.verdict),
            "sentence": self.sentence(),
            "profile": self.profile,
            "stage": self.stage,
            "job": self.job,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "time": self.time,
            "seconds": round(self.seconds, 1),
            "folder": str(self.folder),
            "findings": [_finite(finding.as_json()) for finding in self.findings],
            "measured": {
                check: [_finite(asdict(each)) for each in of_ranks]
                for check, of_ranks in self.measured.items()
            },
        }

    def sentence(self) -> str:
        """The verdict, in one sentence."""
        checks = {v: [f.check for f in self.findings if f.verdict is v] for v in Verdict}
        failed, slow = checks[Verdict.FAILED], checks[Verdict.SLOW]
        num = len(self.findings)
        if failed:
            return f"failed: {', '.join(failed)} ({len(failed)} of {num} checks)"
        if slow:
            return f"all {num} checks are correct, but slow or uneven: {', '.join(slow)}"
        return f"all {num} checks are ok"

    def page(self) -> str:
        """One line a check; what is not ok comes with its remedy."""
        width = max(len(finding.check) for finding in self.findings)
        begin = len("failed") + width + 4
        lines = [
            f"profile {self.profile}, as for {self.stage}: {_count(self.nodes, 'node')}, "
            f"{_count(self.ranks, 'rank')}, job {self.job}, {seconds(self.seconds)}",
            "",
        ]
        for finding in self.findings:
            head = f"{finding.verdict:<6}  {finding.check:<{width}}  "
            lines += _wrapped(head, finding.detail, begin)
            if finding.verdict is not Verdict.OK and finding.remedy:
                lines += _wrapped(" " * begin + "-> ", finding.remedy, begin + 3)
        place = "/".join(self.folder.parts[-3:])
        return "\n".join(
            [
                *lines,
                "",
                f"{self.sentence()}; exit status {self.exit_status}",
                f"report.json and the logs are in {place}",
            ]
        )

    def write(self, folder: Path) -> None:
        text = json.dumps(self.as_json(), indent=2, allow_nan=False)
        atomic.write_text(folder / "report.json", text + "\n")
        atomic.write_text(folder / "report.txt", self.page() + "\n")


def last_report(home: Path, profile: str) -> dict[str, Any] | None:
    """The newest report of a profile in a clone, as JSON."""
    for path in sorted((home / "selftest").glob("[0-9]*/report.json"), reverse=True):
        report: dict[str, Any] = atomic.load_json(path)
        if report.get("version") == Report.VERSION and report["profile"] == profile:
            return report
    return None


def remove_bulk(folder: Path) -> None:
    """What only the checks themselves needed: models, checkpoints, heartbeats."""
    shutil.rmtree(folder / "checks", ignore_errors=True)


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        head + text,
        max(WIDTH, indent + 40),
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _finite(value: Any) -> Any:
    """JSON has no word for infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
