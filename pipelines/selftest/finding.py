"""What one check of a self-test has found."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How a check went; of a whole self-test, the worst of them."""

    OK = "ok"
    SLOW = "slow"
    """It works, and less well than it should."""
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One check. `remedy` says what to do where it is not ok."""

    check: str
    verdict: Verdict
    detail: str
    value: float | None = None
    unit: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: list[Finding]) -> Verdict:
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.FAILED)
