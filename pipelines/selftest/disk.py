"""The file system that the ranks share: how fast, how soon others see a change, whether locks hold.

One rank of each node takes part; the others only keep step. Data is written in pieces that are each
flushed to the disk, so that a node's memory does not pass for it, and read by another node than the
one that wrote it.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from pipelines.base import atomic
from pipelines.base.disk_speed import PIECE, free_bytes, write_speed
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock

MOST_PIECES = 128
SECONDS = 1.0
"""For how long a node writes, or reads."""
MOST_SECONDS_ALONE = 16.0
"""For how long all nodes do so, one after another."""
SYNCS = 10
SEEN_S = 40.0
"""How long a change may take to be seen; NFS caches a listing for up to a minute."""
POLL_S = 0.005


class Meeting(Protocol):
    """What is needed of the ranks: all call it at the same point."""

    rank: int

    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Nodes:
    """One rank of each node, in order."""

    ranks: Meeting
    leaders: Sequence[int]

    @classmethod
    def of(cls, ranks: Meeting, node: str) -> "Nodes":
        nodes = ranks.gather(node)
        return cls(ranks, sorted({each: nodes.index(each) for each in nodes}.values()))

    @property
    def me(self) -> int | None:
        """This node's place, if this rank stands for it."""
        return self.leaders.index(self.ranks.rank) if self.ranks.rank in self.leaders else None

    def meet(self) -> None:
        self.ranks.gather(None)


def measure(ranks: Meeting, node: str, folder: Path) -> dict[str, Any]:
    """All ranks call it; what this one found, nothing of one that does not stand for its node."""
    nodes = Nodes.of(ranks, node)
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        **_rates(nodes, folder),
        **_visibility(nodes, folder),
        "lock": _locks(nodes, folder / "lock"),
    }
    nodes.meet()
    if nodes.me is None:
        return {}
    return {
        **found,
        "folder": str(folder),
        "sync_s": _sync_seconds(folder / f"sync-{nodes.me}"),
        "free_bytes": free_bytes(folder),
    }


def _rates(nodes: Nodes, folder: Path) -> dict[str, float]:
    """GB/s of this node, while the others wait and while all are at it."""
    me, count = nodes.me, len(nodes.leaders)
    seconds = min(SECONDS, MOST_SECONDS_ALONE / count)
    mine = folder / f"data-{me}"
    of_another = folder / f"data-{((me or 0) + 1) % count}"
    rates: dict[str, float] = {}
    steps: dict[str, Callable[[], float]] = {
        "write": lambda: write_speed(mine, seconds, MOST_PIECES),
        "read": lambda: _read(of_another, seconds),
    }
    for name, step in steps.items():
        for turn in range(count):
            if me == turn:
                rates[f"{name}_alone"] = step()
            nodes.meet()
    for name, step in steps.items():
        if me is not None:
            rates[f"{name}_together"] = step()
        nodes.meet()
    if me is not None:
        mine.unlink()
    return rates


def _read(path: Path, seconds: float) -> float:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(len(PIECE))
        started, num_bytes = time.monotonic(), 0
        while got := file.readinto(buffer):
            if buffer[:got] != PIECE[:got]:
                raise LockstepError(f"{path}: what was read is not what another node wrote")
            num_bytes += got
            if time.monotonic() - started > seconds:
                break
    return num_bytes / (time.monotonic() - started) / 1e9


def _sync_seconds(path: Path) -> float:
    """The median time of a small write that is flushed to the disk."""
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            started = time.monotonic()
            file.write(b"x" * 512)
            os.fsync(file.fileno())
            times.append(time.monotonic() - started)
    path.unlink()
    return median(times)


def _visibility(nodes: Nodes, folder: Path) -> dict[str, float | None]:
    """Seconds until this node sees a new file, and another content; None: not in SEEN_S.

    It has looked before, so that an answer of its own cache counts as not seen.
    """
    path = folder / "news"
    seen: dict[str, float | None] = {}
    for change in ("new", "replaced"):
        _text(path)
        nodes.meet()
        started = time.monotonic()
        if nodes.me == 0:
            atomic.write_text(path, change)
        elif nodes.me is not None:
            seen[change] = _wait_for(path, change, started)
        nodes.meet()
    return {f"{change}_seen_s": seconds for change, seconds in seen.items()}


def _wait_for(path: Path, text: str, started: float) -> float | None:
    while _text(path) != text:
        if time.monotonic() - started > SEEN_S:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - started


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _locks(nodes: Nodes, path: Path) -> str:
    """Whether a lock that one node holds keeps the others out, and only as long as it is held."""
    held, free = True, True
    try:
        if nodes.me == 0:
            with hold_lock(path) as mine:
                nodes.meet()
                nodes.meet()
            held = mine
        else:
            nodes.meet()
            if nodes.me is not None:
                with hold_lock(path) as got:
                    held = not got
            nodes.meet()
        nodes.meet()
        for turn in range(len(nodes.leaders)):
            if nodes.me == turn:
                with hold_lock(path) as got:
                    free = got
            nodes.meet()
    except LockstepError as error:
        return str(error)
    if not held:
        return "two nodes held it at once"
    return "ok" if free else "it could not be had after it was let go"
