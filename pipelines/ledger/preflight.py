"""What the ranks of a job found out about their nodes before the stage began.

Each rank writes one report for each start of the job. Which nodes an attempt has found to be bad
is read off these files; whoever submits the next one passes that on in its launch.json.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pipelines.ledger import files


@dataclass(frozen=True)
class BadNode:
    """A node that a job should not have, by the name that Slurm knows it by."""

    node: str
    why: str

    def __str__(self) -> str:
        return f"{self.node} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """preflight/RESTART/node-LABEL.json, links-LABEL.json: what one rank found."""

    VERSION: ClassVar[int] = 1

    rank: int
    node: str
    bad: tuple[BadNode, ...] = ()
    """This rank's node, or others that it met."""
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float
    time: float


def report_path(attempt: Path, restart: int, label: str, what: str, *, bad: bool) -> Path:
    """A bad node is told by the name: drivers look often, and there are many ranks."""
    name = f"{'bad-' if bad else ''}{what}-{label}.json"
    return attempt / "preflight" / f"{restart:03}" / name


def node_reports(attempt: Path, restart: int) -> list[NodeReport]:
    """What each rank has said of its own node at one start of the job."""
    return _read(attempt, f"{restart:03}/*node-*.json")


def num_reports(attempt: Path, restart: int) -> int:
    """How many ranks have said something of their own node; it reads none of that."""
    return sum(1 for _ in attempt.glob(f"preflight/{restart:03}/*node-*.json"))


def bad_nodes_of(
    attempt: Path, restart: int | None = None, label: str = "*"
) -> tuple[BadNode, ...]:
    """Those that an attempt, or a session, has found, at all its starts or one; each once."""
    start = "*" if restart is None else f"{restart:03}"
    reports = _read(attempt, f"{start}/bad-*-{label}.json")
    return each_once(bad for report in reports for bad in report.bad)


def _read(attempt: Path, pattern: str) -> list[NodeReport]:
    paths = sorted(attempt.glob(f"preflight/{pattern}"))
    return [report for path in paths if (report := files.read(NodeReport, path))]


def each_once(nodes: Iterable[BadNode]) -> tuple[BadNode, ...]:
    """By node, with the first reason."""
    found: dict[str, BadNode] = {}
    for bad in nodes:
        found.setdefault(bad.node, bad)
    return tuple(found.values())


def exclude_flag(chosen: str | None, bad: Iterable[BadNode]) -> str | None:
    """For --exclude: the nodes of the profile, and those that turned out to be bad."""
    return ",".join(filter(None, [chosen, *(each.node for each in bad)])) or None


def in_words(bad: Iterable[BadNode]) -> str:
    return "; ".join(map(str, bad))
