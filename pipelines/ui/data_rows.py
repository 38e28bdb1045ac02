"""The rows that `prepare` wrote, with their tokens after the chat template.

Files are read in blocks of rows, and a search stops at the first that have enough: a file may be
larger than memory. Where tokens are trained on is what the row itself says: its loss mask,
or, where it has none, all of a response and nothing of a prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import NEEDS_PYARROW
from pipelines.ui.rollout_files import copies_of
from pipelines.ui.token_pieces import Piece, pieces, read_tokenizer
from stages.contracts.sources import Role

DATA = Path("artifacts/data")
BASE = Path("artifacts/base")
MOST_TOKENS = 3000
"""Of each part of a row: more is slow to draw, and the row's text is there as well."""
MOST_GROUPS = 16
"""Row groups that one request searches."""
MOST_ROWS = 50
"""Of one answer."""
PARTS = {
    "prompt_ids": "prompt",
    "completion_ids": "response",
    "chosen_ids": "chosen",
    "rejected_ids": "rejected",
}
TEXTS = ("prompt", "completion", "chosen", "rejected", "answer", "extra")
_IDS = {*PARTS, "loss_mask", "step_ends"}
_PROMPT, _UNTRAINED, _TRAINED, _WRONG_STEP, _RIGHT_STEP = range(5)
KINDS = {
    _PROMPT: "prompt",
    _UNTRAINED: "not trained on",
    _TRAINED: "trained on",
    _WRONG_STEP: "wrong step",
    _RIGHT_STEP: "right step",
}
_LEARNT = (_TRAINED, _WRONG_STEP, _RIGHT_STEP)


@dataclass(frozen=True)
class Query:
    """Which rows: from the row with number `start` on, those that match."""

    role: Role
    source: str = ""
    text: str = ""
    """A part of any of the row's texts, whatever its case."""
    start: int = 0
    limit: int = 10


@dataclass(frozen=True)
class Part:
    """A prompt or a response, as the model reads it."""

    name: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int
    num_left_out: int = 0
    """Tokens at the end that are not shown."""


@dataclass(frozen=True)
class Row:
    number: int
    """Its place in the file, from 0."""
    group: int
    values: Mapping[str, Any]
    """What is not token ids."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Found:
    """Rows of a file, and where to go on."""

    role: Role
    num_rows: int
    num_groups: int
    searched_to: int
    """The first row that was not looked at; `num_rows` at the end."""
    rows: tuple[Row, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kinds": list(KINDS.values())}


def path_of(root: Path, role: Role) -> Path:
    return root / DATA / f"{role}.parquet"


def open_role(root: Path, role: Role) -> Any:
    """The Parquet file of a role; LockstepError where it is not there or not whole."""
    try:
        import pyarrow.parquet as pq

        from pipelines.ui.small_groups import best_copy
    except ModuleNotFoundError:
        raise LockstepError(NEEDS_PYARROW) from None
    path = path_of(root, role)
    if not path.is_file():
        raise LockstepError(
            f"{path} does not exist: `lockstep run prepare` writes it, or `dvc pull "
            f"{DATA / path.name}` fetches it from a remote"
        )
    try:
        return pq.ParquetFile(best_copy(path, copies_of(root)))
    except (OSError, ValueError) as error:
        raise LockstepError(f"{path}: not readable as Parquet: {error}") from None


def find_rows(root: Path, query: Query) -> Found:
    """The first rows that match; a search that does not find enough ends after some groups."""
    with open_role(root, query.role) as file:
        from pipelines.ui.parquet_pages import take

        tokenizer = _tokenizer(root)
        rows: list[Row] = []
        to = min(query.start, file.metadata.num_rows)
        left = [it for it in _groups(file) if it[1] + it[2] > query.start][:MOST_GROUPS]
        for group, first, size in left:
            wanted = query.limit - len(rows)
            matching = _matching(file, query, (max(query.start, first), first + size), wanted)
            table = take(file, file.schema_arrow.names, matching)
            for number, values in zip(matching, table, strict=True):
                rows.append(_row(query.role, number, group, values, tokenizer))
            to = first + size
            if len(rows) == query.limit:
                to = rows[-1].number + 1
                break
        return Found(query.role, file.metadata.num_rows, file.num_row_groups, to, tuple(rows))


def _groups(file: Any) -> Iterator[tuple[int, int, int]]:
    """Number, first row and size of each row group."""
    first = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        yield group, first, size
        first += size


def _matching(file: Any, query: Query, span: tuple[int, int], limit: int) -> list[int]:
    """The first rows of a span that match, read in blocks until there are enough."""
    start, stop = span
    if not query.source and not query.text:
        return list(range(start, min(start + limit, stop)))
    import pyarrow as pa
    import pyarrow.compute as pc

    from pipelines.ui.parquet_pages import batches

    texts = [name for name in TEXTS if name in file.schema_arrow.names] if query.text else []
    found: list[int] = []
    for batch in batches(file, [*texts, "source"], start, stop):
        keep = pa.array([True] * len(batch))
        if query.source:
            keep = pc.fill_null(pc.equal(batch["source"], query.source), False)
        if query.text:
            has = pa.array([False] * len(batch))
            for name in texts:
                there = pc.match_substring(batch[name], query.text, ignore_case=True)
                has = pc.or_(has, pc.fill_null(there, False))
            keep = pc.and_(keep, has)
        found += [start + index for index in pc.indices_nonzero(keep).to_pylist()]
        if len(found) >= limit:
            break
        start += len(batch)
    return found[:limit]


def _row(role: Role, number: int, group: int, values: Mapping[str, Any], tokenizer: Any) -> Row:
    parts = [
        _part(name, values[column], _kinds(role, column, values), tokenizer)
        for column, name in PARTS.items()
        if column in values
    ]
    shown = {name: value for name, value in values.items() if name not in _IDS}
    return Row(number, group, shown, tuple(parts))


def _kinds(role: Role, column: str, values: Mapping[str, Any]) -> list[int]:
    """What each token is. A step's label is learnt at its last token, and said of all of it."""
    ids = values[column]
    if column == "prompt_ids":
        return [_PROMPT] * len(ids)
    if role.is_held_out:
        return [_UNTRAINED] * len(ids)
    if values.get("loss_mask") is not None:
        return [_TRAINED if learnt else _UNTRAINED for learnt in values["loss_mask"]]
    if "step_ends" not in values:
        return [_TRAINED] * len(ids)
    kinds: list[int] = []
    for end, label in zip(values["step_ends"], values["step_labels"], strict=True):
        kinds += [_RIGHT_STEP if label else _WRONG_STEP] * (end + 1 - len(kinds))
    return kinds + [_UNTRAINED] * (len(ids) - len(kinds))


def _part(name: str, ids: Sequence[int], kinds: Sequence[int], tokenizer: Any) -> Part:
    shown = pieces(tokenizer, ids[:MOST_TOKENS], kinds[:MOST_TOKENS])
    trained = sum(kind in _LEARNT for kind in kinds)
    return Part(name, tuple(shown), len(ids), trained, max(len(ids) - MOST_TOKENS, 0))


def _tokenizer(root: Path) -> Any:
    path = root / BASE / "tokenizer.json"
    try:
        signature = (path.stat().st_mtime_ns, path.stat().st_size)
    except OSError:
        signature = (0, 0)
    return _read_once(root / BASE, signature)


@lru_cache(maxsize=4)
def _read_once(folder: Path, signature: tuple[int, int]) -> Any:  # noqa: ARG001 -- of which file
    return read_tokenizer(folder)
