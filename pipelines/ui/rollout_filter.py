"""Which rollout rows to show: the rows that pass, found from a row on, for a limited time.

Statistics of row groups narrow the file down first; of what is left, only the columns that a filter
needs are read. A search that takes too long stops and says how far it came, so that it can go on
from there: whatever the file's size, an answer comes soon.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.base.errors import LockstepError
from pipelines.ui.parquet_pages import Span, batches, beside, columns_in, common, groups, possible

SECONDS = 1.5
PLACE = ("step", "prompt_id", "sample_index")
"""What tells a row of one iteration from all others; only `online` has steps."""


@dataclass(frozen=True)
class Wanted:
    """What a row has to have; None: anything."""

    text: str | None = None
    """Part of its prompt or of its response, in any case of letters."""
    prompt: str | None = None
    """The start of its prompt's id."""
    finish: str | None = None
    source: str | None = None
    """Whose score the limits are for; None: the reward that was learnt from."""
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    trained: bool | None = None
    """Whether the update used it."""

    @property
    def limits_reward(self) -> bool:
        return self.reward_min is not None or self.reward_max is not None

    @property
    def limits_length(self) -> bool:
        return self.length_min is not None or self.length_max is not None


@dataclass(frozen=True)
class Found:
    """The numbers of the rows that passed, in order."""

    rows: tuple[int, ...]
    next: int | None
    """Where to go on; None: there is no row left."""
    searched: int
    """All rows before this one have been looked at."""


@dataclass(frozen=True)
class Tables:
    """The open files; scores are row by row beside the rollouts."""

    rollouts: pq.ParquetFile
    scores: pq.ParquetFile | None
    experience: pq.ParquetFile | None

    @property
    def num_rows(self) -> int:
        return int(self.rollouts.metadata.num_rows)


def find(tables: Tables, wanted: Wanted, start: int, size: int, seconds: float = SECONDS) -> Found:
    """The first rows from `start` on that pass, as many as `size`."""
    deadline, rows = time.monotonic() + seconds, list[int]()
    spans = _spans(tables, wanted)
    columns, score_columns = _columns(tables, wanted)
    for first, stop in common(spans, [(start, tables.num_rows)]):
        if not columns and not score_columns:
            rows += range(first, min(stop, first + size - len(rows)))
            if len(rows) == size:
                break
            continue
        position = first
        for sampled, scored in _blocks(tables, columns, score_columns, first, stop):
            passing = _passing(tables, wanted, sampled, scored)
            for index in pc.indices_nonzero(passing).to_pylist():
                rows.append(position + index)
                if len(rows) == size:
                    return _found(tables, rows, rows[-1] + 1)
            position += len(passing)
            if time.monotonic() > deadline:
                return _found(tables, rows, position)
    return _found(tables, rows, rows[-1] + 1 if len(rows) == size else tables.num_rows)


def _found(tables: Tables, rows: Sequence[int], searched: int) -> Found:
    return Found(tuple(rows), searched if searched < tables.num_rows else None, searched)


def _spans(tables: Tables, wanted: Wanted) -> list[Span]:
    """What the statistics leave."""
    spans = groups(tables.rollouts)
    if (prompt := wanted.prompt) is not None:
        size = len(prompt)

        def may_have(least: str, largest: str) -> bool:
            return least[:size] <= prompt <= largest[:size]

        spans = common(spans, possible(tables.rollouts, "prompt_id", may_have))
    if (finish := wanted.finish) is not None:
        has_finish = _between(finish, finish)
        spans = common(spans, possible(tables.rollouts, "finish_reason", has_finish))
    if wanted.limits_reward and wanted.source is None and tables.scores is not None:
        within = _between(wanted.reward_min, wanted.reward_max)
        spans = common(spans, possible(tables.scores, "reward", within))
    return spans


def _between(low: Any, high: Any) -> Callable[[Any, Any], bool]:
    """Whether a group from `least` to `largest` may have something between these."""

    def test(least: Any, largest: Any) -> bool:
        return (low is None or largest >= low) and (high is None or least <= high)

    return test


def _columns(tables: Tables, wanted: Wanted) -> tuple[list[str], list[str]]:
    """What the filters read, of the rollouts and of the scores."""
    needs = {
        "prompt": wanted.text is not None,
        "response": wanted.text is not None,
        "prompt_id": wanted.prompt is not None,
        "finish_reason": wanted.finish is not None,
        "response_ids": wanted.limits_length,
    }
    columns = [name for name, is_needed in needs.items() if is_needed]
    if wanted.trained is not None:
        if tables.experience is None:
            raise LockstepError(
                "which rows were trained on is not recorded for this iteration: choose all rows"
            )
        columns += [name for name in columns_in(tables.rollouts, PLACE) if name not in columns]
    if not wanted.limits_reward:
        return columns, []
    if tables.scores is None:
        raise LockstepError("this iteration has no scores yet: `lockstep run` computes them")
    return columns, ["reward"] if wanted.source is None else ["by_source"]


Batch: TypeAlias = pa.RecordBatch | None


def _blocks(
    tables: Tables, columns: Sequence[str], score_columns: Sequence[str], first: int, stop: int
) -> Iterator[tuple[Batch, Batch]]:
    """The columns of both files, a block of rows at a time; None for a file that is not needed."""
    sampled = batches(tables.rollouts, columns, first, stop)
    if not score_columns:
        yield from ((batch, None) for batch in sampled)
        return
    assert tables.scores is not None
    scored = batches(tables.scores, score_columns, first, stop)
    if not columns:
        yield from ((None, batch) for batch in scored)
        return
    yield from ((one, other) for one, other in beside(sampled, scored))


def _passing(tables: Tables, wanted: Wanted, sampled: Batch, scored: Batch) -> pa.BooleanArray:
    """For each row of a block, whether it passes every filter."""
    tests: list[Any] = []
    if scored is not None:
        tests += _limits(_reward(scored, wanted.source), wanted.reward_min, wanted.reward_max)
    if sampled is not None:
        if wanted.text is not None:
            texts = (sampled["prompt"], sampled["response"])
            parts = [pc.match_substring(t, wanted.text, ignore_case=True) for t in texts]
            tests.append(pc.or_(*parts))
        if wanted.prompt is not None:
            tests.append(pc.starts_with(sampled["prompt_id"], wanted.prompt))
        if wanted.finish is not None:
            tests.append(pc.equal(sampled["finish_reason"], wanted.finish))
        if wanted.limits_length:
            lengths = pc.list_value_length(sampled["response_ids"])
            tests += _limits(lengths, wanted.length_min, wanted.length_max)
        if wanted.trained is not None:
            used = _is_used(tables, sampled)
            tests.append(used if wanted.trained else pc.invert(used))
    passing = tests[0]
    for test in tests[1:]:
        passing = pc.and_(passing, test)
    return pc.fill_null(passing, False)


def _reward(scored: pa.RecordBatch, source: str | None) -> pa.Array:
    if source is None:
        return scored["reward"]
    return pc.map_lookup(scored["by_source"], pa.scalar(source), "first")


def _limits(values: pa.Array, low: float | None, high: float | None) -> list[pa.Array]:
    tests = [] if low is None else [pc.greater_equal(values, low)]
    return tests if high is None else [*tests, pc.less_equal(values, high)]


def _is_used(tables: Tables, sampled: pa.RecordBatch) -> pa.Array:
    """Whether each row is one that the update used."""
    assert tables.experience is not None
    columns = columns_in(tables.experience, PLACE)
    spans = groups(tables.experience)
    for name in columns:
        ends = pc.min_max(sampled[name]).as_py()
        spans = common(spans, possible(tables.experience, name, _between(ends["min"], ends["max"])))
    read = (batch for span in spans for batch in batches(tables.experience, columns, *span))
    keys = [_key(batch) for batch in read]
    if not keys:
        return pa.array([False] * len(sampled))
    return pc.is_in(_key(sampled), value_set=pa.concat_arrays(keys))


def _key(batch: pa.RecordBatch) -> pa.Array:
    parts = [pc.cast(batch[name], pa.string()) for name in PLACE if name in batch.schema.names]
    return pc.binary_join_element_wise(*parts, ":")
