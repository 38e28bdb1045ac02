"""Work that processes share out and that outlives them: units of rows, and their results in parts.

A pass is cut into units of consecutive rows. Where it is cut depends on the pass alone, so results
do not depend on how many processes (shards) there are, on who computed a unit, or on how often they
died. A unit's results are one file, `scratch/parts/PASS/START-STOP.json`: written aside, synced,
renamed, and checked by its hash when read, so that a torn or corrupted one counts as missing. A
shard computes the missing units of its own share and no others; nobody waits and nothing is locked.
Whoever then finds that all parts are there has all results, in the order of the rows.

A context may keep parts in memory instead: then nothing outlives the process.

Ranks that are joined share the units in the same way, and give each other their results. They stop
together: one that is asked to leaves its units open, and all see so when they come to collect. Of
ranks whose GPUs compute a unit as one, the first has a share. What goes through a model they
compute together, unit after unit or several at once, so that each rank has a share of every unit;
rank 0 keeps the parts.
"""

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.context import Context, ShareDone, Stopped

if TYPE_CHECKING:
    from stages.engines.processes.ranks import Ranks

LOOK_INTERVAL_S = 1.0
UNIT_ROWS = 256
"""Rows of a unit that is scored: what a kill may cost, and the least that a shard takes on."""
Compute = Callable[[range], Sequence[Any]]
"""The results of a unit, one per row: JSON."""
Several = Callable[[Iterator[range]], Iterator[tuple[range, Sequence[Any]]]]
"""Units, as far as they are asked for, each with its results once it has them, in any order."""
Together = Callable[[Sequence[range]], Iterator[tuple[range, Sequence[Any]]]]
"""Units, each with its results once it has them; all ranks that are joined ask for the same ones,
and stop together."""


@dataclass(frozen=True)
class Pass:
    """One computation over `num_rows` rows, `unit_rows` of them at a time."""

    name: str
    """Parts of another name are never read: whatever the results depend on besides the stage's
    inputs and params is named here."""
    num_rows: int
    unit_rows: int
    load: Callable[[], Compute]
    """Makes ready to compute, such as by loading a model; called only if something is missing."""
    numbers: Callable[[Sequence[Any]], Mapping[str, float]] = lambda _: {}
    """What the progress line says about the results of the latest unit."""
    close: Callable[[], None] = lambda: None
    """Lets go of what `load` opened; called once nothing more is computed, whatever the reason."""
    phase: str = "rows"
    """What the progress line counts."""
    together: Together | None = None
    """How joined ranks compute units together, where they do; instead of `load`."""
    load_several: Callable[[], Several] | None = None
    """The same of what computes several units at a time; instead of `load`."""
    ranks_per_unit: int = 1
    """Neighbouring ranks of which the first computes units, on the GPUs of all."""

    @property
    def units(self) -> list[range]:
        starts = range(0, self.num_rows, self.unit_rows)
        return [range(start, min(start + self.unit_rows, self.num_rows)) for start in starts]


def pass_names(ctx: Context, prefix: str) -> list[str]:
    """The passes of that prefix which have parts."""
    if ctx.parts is not None:
        return sorted(
            {path.parent.name for path in ctx.parts if path.parent.name.startswith(prefix)}
        )
    return sorted(path.name for path in (ctx.scratch / "parts").glob(f"{prefix}*"))


def missing(ctx: Context, work: Pass) -> list[range]:
    """The units of this shard's share that have no whole part."""
    return [unit for unit in _share(ctx, work) if _found(ctx, work, unit) is None]


def _share(ctx: Context, work: Pass) -> list[range]:
    """This shard's, or rank's, units.

    Shares are interleaved, so that what an earlier attempt left to do falls to all shards alike,
    whatever its number of shards.
    """
    if ctx.world > 1:
        group, place = divmod(ctx.rank, work.ranks_per_unit)
        return [] if place else work.units[group :: ctx.world // work.ranks_per_unit]
    return work.units[ctx.shard :: ctx.num_shards]


def fill(ctx: Context, *passes: Pass) -> None:
    """Compute this shard's missing units, pass after pass, with one pass loaded at a time."""
    for work in passes:
        try:
            if ctx.ranks is not None and work.together is not None:
                _compute_together(ctx, ctx.ranks, work, work.together)
            elif todo := missing(ctx, work):
                _compute(ctx, work, todo)
        finally:
            work.close()


def collect(ctx: Context, work: Pass) -> list[Any]:
    """The results of all rows, in their order; ShareDone where another shard owes some of them.

    Of ranks that are joined, all call it; Stopped where one of them has left units open.
    """
    if ctx.ranks is not None:
        return _exchange(ctx, ctx.ranks, work)
    if ctx.parts is None:
        _refresh(_folder(ctx, work))
    absent = work.num_rows - _rows_there(ctx, work)
    if absent:
        raise ShareDone(f"{absent} of {work.num_rows} rows of {work.name} are for other shards")
    results: list[Any] = []
    for unit in work.units:
        part = _found(ctx, work, unit)
        if part is None:
            raise ShareDone(f"{_path(ctx, work, unit)} is not whole: its shard has to run again")
        results += part
    return results


def _exchange(ctx: Context, ranks: "Ranks", work: Pass) -> list[Any]:
    if work.together is not None:
        parts = ranks.same({} if ranks.rank else _kept(ctx, work, work.units))
    else:
        # Longer than a collective may take: whoever computes has not yet come to one.
        ranks.meet(f"the end of {work.phase}")
        own = _kept(ctx, work, _share(ctx, work))
        parts = {start: part for some in ranks.gather(own) for start, part in some.items()}
    results: list[Any] = []
    for unit in work.units:
        part = parts[unit.start]
        if part is None:
            raise Stopped(f"stopped before row {unit.start} of {work.name}")
        results += part
    return results


def _kept(ctx: Context, work: Pass, units: Sequence[range]) -> dict[int, list[Any] | None]:
    return {unit.start: _found(ctx, work, unit) for unit in units}


def _compute_together(ctx: Context, ranks: "Ranks", work: Pass, compute: Together) -> None:
    """Rank 0 says what is missing, since its parts are those that count."""
    ranks.meet(f"the start of {work.phase}")
    kept = {} if ranks.rank else _kept(ctx, work, work.units)
    todo = ranks.same([unit for unit in work.units if kept.get(unit.start) is None])
    for unit, results in compute(todo) if todo else ():
        if not ranks.rank:
            _keep(ctx, work, unit, results)


def _compute(ctx: Context, work: Pass, todo: Sequence[range]) -> None:
    several = work.load_several() if work.load_several else one_by_one(work.load())
    left = set(todo)

    def wanted() -> Iterator[range]:
        for unit in todo:
            if ctx.should_stop():
                raise Stopped(f"stopped before row {unit.start} of {work.name}")
            yield unit

    looked = -math.inf
    try:
        for unit, results in several(wanted()):
            _keep(ctx, work, unit, results)
            left.remove(unit)
            if not left or time.monotonic() - looked >= LOOK_INTERVAL_S:
                done = _rows_there(ctx, work)
                ctx.progress(done, work.num_rows, work.phase, **work.numbers(results))
                looked = time.monotonic()
    except Stopped:
        if ctx.world == 1:
            raise


def one_by_one(compute: Compute) -> Several:
    """What computes a unit after the other."""

    def several(units: Iterator[range]) -> Iterator[tuple[range, Sequence[Any]]]:
        for unit in units:
            yield unit, compute(unit)

    return several


def _folder(ctx: Context, work: Pass) -> Path:
    return ctx.scratch / "parts" / work.name


def _path(ctx: Context, work: Pass, unit: range) -> Path:
    return _folder(ctx, work) / _file_name(unit)


def _file_name(unit: range) -> str:
    return f"{unit.start:08}-{unit.stop:08}.json"


def _rows_there(ctx: Context, work: Pass) -> int:
    """How many rows have a part, of any shard and whole or not: a listing, nothing is read."""
    if ctx.parts is not None:
        return sum(len(unit) for unit in work.units if _path(ctx, work, unit) in ctx.parts)
    there = {path.name for path in _folder(ctx, work).glob("*.json")}
    return sum(len(unit) for unit in work.units if _file_name(unit) in there)


def _found(ctx: Context, work: Pass, unit: range) -> list[Any] | None:
    path = _path(ctx, work, unit)
    return _read(path, unit) if ctx.parts is None else ctx.parts.get(path)


def _keep(ctx: Context, work: Pass, unit: range, results: Sequence[Any]) -> None:
    path = _path(ctx, work, unit)
    if ctx.parts is None:
        _write(path, results)
    else:
        ctx.parts[path] = list(results)


def _read(path: Path, unit: range) -> list[Any] | None:
    try:
        digest, _, payload = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if digest.decode(errors="replace") != hashlib.sha256(payload).hexdigest():
        return None
    results: list[Any] = json.loads(payload)
    return results if len(results) == len(unit) else None


def _write(path: Path, results: Sequence[Any]) -> None:
    payload = json.dumps(results, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    with aside.open("wb") as file:
        file.write(hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _aside(path: Path) -> Path:
    """A name next to `path` that no other process uses, whichever host it is on."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def _refresh(folder: Path) -> None:
    """Make the next listing a fresh one.

    Over NFS a folder's listing is cached for a minute, except after a change by the same host.
    Without this, the last two shards might each miss the other's last part and both go home.
    """
    aside = _aside(folder / "refresh")
    # No part yet, or the one who wrote the outputs has already cleared the scratch.
    with suppress(FileNotFoundError):
        aside.touch()
        aside.unlink()
