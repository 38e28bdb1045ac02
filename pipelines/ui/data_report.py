"""What `prepare` read, kept and dropped, and what the data look like: counts, lengths, overlap.

Counts are those that `prepare` recorded. Lengths and the overlap with held-out prompts are counted
in the files themselves, row group by row group, once for each state of a file.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.ui.data_rows import DATA, PARTS, open_role, path_of
from stages.contracts.sources import Role

REPORT = DATA / "report.json"
METRICS = Path("metrics/prepare.json")
MOST_BINS = 40
_HELD_OUT = (Role.HELD_OUT, Role.HELD_OUT_PREFERENCES)

REASONS = {
    "unreadable": "the row is not what its format says (prepare.bad_rows)",
    "duplicate": "the role has the same content already (prepare.duplicates)",
    "contaminated": "its prompt is in a held-out source (prepare.contamination)",
    "held_out": "its prompt was split off to be held out (prepare.held_out)",
    "too_long": "prompt and response do not fit model.max_length (prepare.too_long)",
    "not_drawn": "its source's weight is below 1, and the seed left it out (weight)",
}


@dataclass(frozen=True)
class Bin:
    """How many rows are so many tokens long, both ends included."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Lengths:
    """The tokens of one part of a role's rows; `whole` is the prompt with its longest response."""

    role: Role
    part: str
    num_rows: int
    num_tokens: int
    least: int
    median: int
    most: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Overlap:
    """Rows of a training role whose prompt is also held out; none, if `prepare` did its work."""

    role: Role
    num_rows: int
    num_held_out: int


@dataclass(frozen=True)
class DataReport:
    template: str | None
    sources: tuple[dict[str, Any], ...]
    unused_files: tuple[str, ...]
    metrics: dict[str, float]
    roles: tuple[Role, ...]
    """Those that have a file with rows."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": REASONS}


def read_report(root: Path) -> DataReport:
    """The record of `prepare`; LockstepError where it has not run here."""
    report = _json(root / REPORT, f"dvc pull {REPORT}")
    metrics = _json(root / METRICS, f"git checkout {METRICS}")
    try:
        sources = tuple({**row, "dropped": dict(row["dropped"])} for row in report["sources"])
        roles = tuple(Role(role) for role in dict.fromkeys(row["role"] for row in sources))
        return DataReport(
            report["template"],
            sources,
            tuple(report["unused_files"]),
            {name: value for name, value in metrics.items() if type(value) in (int, float)},
            tuple(role for role in roles if path_of(root, role).is_file()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            f"{root / REPORT} is not what prepare writes ({error}): `lockstep run prepare`"
        ) from None


def _json(path: Path, restore: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockstepError(
            f"{path} does not exist: `lockstep run prepare` writes it, or `{restore}`"
        ) from None
    except (OSError, ValueError) as error:
        raise LockstepError(f"{path} cannot be read ({error}): `{restore}`") from None
    if not isinstance(values, dict):
        raise LockstepError(f"{path} is not a JSON object: `{restore}`")
    return values


def lengths(root: Path, role: Role) -> tuple[Lengths, ...]:
    """Of each part of a role's rows, then of the whole."""
    return _lengths(root, role, _signature(root, role))


@lru_cache(maxsize=32)
def _lengths(root: Path, role: Role, signature: object) -> tuple[Lengths, ...]:  # noqa: ARG001
    import pyarrow.compute as pc

    counts: dict[str, Counter[int]] = {}
    with open_role(root, role) as file:
        columns = [column for column in PARTS if column in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns)
            parts = {PARTS[column]: pc.list_value_length(table[column]) for column in columns}
            if responses := [parts[name] for name in parts if name != "prompt"]:
                parts["whole"] = pc.add(parts["prompt"], pc.max_element_wise(*responses))
            for name, values in parts.items():
                of_part = counts.setdefault(name, Counter())
                for pair in pc.value_counts(values).to_pylist():
                    of_part[pair["values"]] += pair["counts"]
    return tuple(_summary(role, name, of_part) for name, of_part in counts.items())


def _summary(role: Role, part: str, counts: Counter[int]) -> Lengths:
    least, most = min(counts), max(counts)
    width = max(1, -(-(most + 1 - least) // MOST_BINS))
    bins: Counter[int] = Counter()
    for length, number in counts.items():
        bins[(length - least) // width] += number
    return Lengths(
        role,
        part,
        num_rows=counts.total(),
        num_tokens=sum(length * number for length, number in counts.items()),
        least=least,
        median=_median(counts),
        most=most,
        bins=tuple(
            Bin(least + i * width, least + (i + 1) * width - 1, bins[i])
            for i in range((most - least) // width + 1)
        ),
    )


def _median(counts: Counter[int]) -> int:
    """The lower one of the two in the middle."""
    left = (counts.total() + 1) // 2
    for length in sorted(counts):
        left -= counts[length]
        if left <= 0:
            return length
    raise AssertionError("a file without rows has no median")


def overlaps(root: Path, roles: tuple[Role, ...]) -> tuple[Overlap, ...]:
    """Of each training role, how many rows have exactly the prompt of a held-out row."""
    here = tuple((role, _signature(root, role)) for role in roles)
    return _overlaps(root, here)


@lru_cache(maxsize=4)
def _overlaps(root: Path, roles: tuple[tuple[Role, object], ...]) -> tuple[Overlap, ...]:
    import pyarrow as pa
    import pyarrow.compute as pc

    def prompts(role: Role) -> Any:
        with open_role(root, role) as file:
            return file.read(columns=["prompt_id"])["prompt_id"].combine_chunks()

    names = [role for role, _ in roles]
    held_out = [prompts(role) for role in _HELD_OUT if role in names]
    known = pa.concat_arrays(held_out) if held_out else pa.array([], pa.string())
    found = []
    for role in names:
        if role not in _HELD_OUT:
            ids = prompts(role)
            same = pc.sum(pc.is_in(ids, value_set=known)).as_py() or 0
            found.append(Overlap(role, len(ids), same))
    return tuple(found)


def _signature(root: Path, role: Role) -> tuple[int, int, int]:
    try:
        of = path_of(root, role).stat()
    except OSError:
        return (0, 0, 0)
    return (of.st_mtime_ns, of.st_size, of.st_ino)
