"""What one check of `lockstep doctor` has found."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CheckResult:
    """One check. `remedy` says what to do when it is not fine."""

    check: str
    fine: bool
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
