"""How long a stage took the last time that it was computed, and with what: as far as is recorded.

A record outlives the outputs. What DVC restored, and what another clone computed, has none here.
"""

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.ledger.entry import Attempt, Entry, Ledger


@dataclass(frozen=True)
class LastTime:
    stage: str
    """The address that was computed; another one of the same stage where there is none of this."""
    seconds: float
    """Of all attempts that noted when they started and ended."""
    attempts: int
    gpus: int
    profile: str | None
    host: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def gpu_seconds(self) -> float:
        return self.seconds * self.gpus


def last_time(ledger: Ledger, address: str) -> LastTime | None:
    """Of this stage, or else of the same stage for another policy."""
    name, at, _ = address.partition("@")
    for pattern in (address, f"{name}@*") if at else (address,):
        for entry in reversed(ledger.entries(pattern)):
            if (found := _of(entry)) is not None:
                return found
    return None


def _of(entry: Entry) -> LastTime | None:
    record = entry.record
    if record is None:
        return None
    attempts = entry.attempts()
    spent = sum(map(_seconds, attempts)) or max(record.ended - record.started, 0.0)
    launch = attempts[-1].launch if attempts else None
    worker = attempts[-1].worker if attempts else None
    resources = launch.resources if launch else None
    return LastTime(
        stage=record.stage,
        seconds=spent,
        attempts=record.attempts,
        gpus=resources.nodes * resources.gpus_per_node if resources else 0,
        profile=launch.profile if launch else None,
        host=worker.host if worker else None,
    )


def _seconds(attempt: Attempt) -> float:
    """One that was killed noted no end, and counts for nothing."""
    result = attempt.result
    if result is None or result.started is None or result.ended is None:
        return 0.0
    return max(result.ended - result.started, 0.0)
