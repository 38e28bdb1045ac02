"""The files between the command and its job: what is to be measured, and what a rank measured."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pipelines.ledger import files

WORDS = {
    "machine": "machines",
    "compute": "matrix products",
    "collectives": "collectives",
    "disk": "file system",
    "alone": "training in one process",
    "together": "training by all ranks",
    "sampler": "sampling",
    "killed": "a rank that dies",
    "resumed": "going on from a checkpoint",
    "vllm": "sampling by vLLM",
}
"""The checks, in their order, as people call them."""


@dataclass(frozen=True)
class Settings:
    """settings.json: what the profile does not say."""

    VERSION: ClassVar[int] = 1

    disks: dict[str, str]
    """Folders to measure, one a file system, by what lies there."""
    vllm: bool = False
    """Whether the pipeline samples with vLLM."""


def write_settings(folder: Path, settings: Settings) -> None:
    files.write(folder / "settings.json", settings)


def read_settings(folder: Path) -> Settings:
    return files.load(Settings, folder / "settings.json")


@dataclass(frozen=True)
class Measurement:
    """measured/CHECK-RANK.json: what one rank found in one check, or why it found nothing."""

    VERSION: ClassVar[int] = 1

    check: str
    rank: int
    node: str
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}"


def write_measurement(folder: Path, measurement: Measurement) -> None:
    files.write(measured_path(folder, measurement.check, measurement.rank), measurement)


def done_path(folder: Path, rank: int) -> Path:
    """The mark of a rank that has all checks behind it."""
    return folder / f"done-{rank:05}"


def measured_path(folder: Path, check: str, rank: int) -> Path:
    return folder / "measured" / f"{check}-{rank:05}.json"


def read_measurements(folder: Path) -> dict[str, list[Measurement]]:
    """By check, in the order of the ranks."""
    # Over NFS a listing is cached for a minute, except after a change by the same host.
    probe = folder / "measured" / ".read"
    with suppress(FileNotFoundError):
        probe.touch()
        probe.unlink()
    measured: dict[str, list[Measurement]] = {}
    for path in sorted((folder / "measured").glob("*.json")):
        found = files.load(Measurement, path)
        measured.setdefault(found.check, []).append(found)
    return measured
