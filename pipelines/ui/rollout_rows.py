"""Rollout rows as the Samples page shows them: a page of many, or one with all its tokens.

A row is known by its number in its file. What was scored and trained on is put beside it by its
place (step, prompt, sample), and scores of other rollouts are refused rather than shown.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.base.errors import LockstepError
from pipelines.ui.parquet_pages import batches, columns_in, common, open_file, possible, take
from pipelines.ui.rollout_files import RolloutFiles
from pipelines.ui.rollout_filter import PLACE, Tables, Wanted, find
from pipelines.ui.small_groups import best_copy
from pipelines.ui.tokens import Pieces, turns_of
from stages.reporting.markup import printable

Row = dict[str, Any]
LISTED = (
    *PLACE,
    "greedy",
    "prompt",
    "response",
    "answer",
    "response_ids",
    "finish_reason",
    "environment_reward",
)
SCORED = (*PLACE, "reward", "by_source")
USED = (*PLACE, "role", "reward", "advantages")
CLIPPED = 400
"""Characters of a text in a list."""
SHOWN_TOKENS = 3000
IN_GROUP = 256


def open_tables(files: RolloutFiles) -> Tables:
    """The files of an iteration; LockstepError where its scores are those of other rollouts."""

    def opened(path: Path) -> pq.ParquetFile:
        return open_file(best_copy(path, files.copies))

    rollouts = opened(files.rollouts)
    scores = opened(files.scores) if files.scores else None
    if scores is not None and scores.metadata.num_rows != rollouts.metadata.num_rows:
        raise LockstepError(_other_rollouts(files))
    return Tables(rollouts, scores, opened(files.experience) if files.experience else None)


def page(files: RolloutFiles, wanted: Wanted, start: int, size: int) -> Row:
    """Some rows that are wanted, from a row on; where to go on, and how far was searched."""
    tables = open_tables(files)
    found = find(tables, wanted, start, size)
    return {
        "name": files.name,
        "target": files.target,
        "policy": files.policy,
        "total": tables.num_rows,
        "rows": _listed(files, tables, found.rows),
        "next": found.next,
        "searched": found.searched,
        "sources": _sources(tables, found.rows[0] if found.rows else start),
        "has_scores": tables.scores is not None,
        "has_experience": tables.experience is not None,
    }


def one(files: RolloutFiles, number: int, first_token: int) -> Row:
    """A row with what there is to know of it; of a very long one, some of the tokens."""
    tables = open_tables(files)
    if not 0 <= number < tables.num_rows:
        raise LockstepError(f"{files.name} has rows 0 to {tables.num_rows - 1}, no row {number}")
    [row] = take(tables.rollouts, tables.rollouts.schema_arrow.names, [number])
    score = _scores(files, tables, [number], [row])[0]
    used = _used(tables, [row])
    roles = used.get(_place(row), [])
    advantages = next((each["advantages"] for each in roles if each["advantages"]), None)
    group = find(tables, Wanted(prompt=row["prompt_id"]), 0, IN_GROUP)
    return {
        **_described(row, score, roles),
        "name": files.name,
        "target": files.target,
        "row": number,
        "total": tables.num_rows,
        "prompt": printable(row["prompt"]),
        "response": printable(row["response"]),
        "extra": row["extra"],
        "policy": files.policy,
        "policy_hash": row["policy_hash"],
        "seed": str(row["seed"]),
        "group": _listed(files, tables, group.rows),
        **_tokens(files, row, score, advantages, first_token),
    }


def _tokens(
    files: RolloutFiles,
    row: Row,
    score: Mapping[str, Any],
    advantages: Sequence[float] | None,
    first: int,
) -> Row:
    """What was sampled token by token, turn by turn, and where the context was shortened."""
    ids, mask = row["response_ids"], row["loss_mask"]
    pieces = Pieces(files.tokenizer)
    texts = pieces.texts(ids)
    window = range(min(max(first, 0), len(ids)), min(max(first, 0) + SHOWN_TOKENS, len(ids)))
    reference = score.get("ref_logprobs")
    histories = row.get("segment_histories") or []
    return {
        "first_token": window.start,
        "tokens": [
            {
                "id": ids[index],
                "text": printable(texts[index]) if texts else None,
                "logprob": _finite(row["logprobs"][index]),
                "ref_logprob": _at(reference, index),
                "advantage": _at(advantages, index),
                "own": mask is None or bool(mask[index]),
            }
            for index in window
        ],
        "turns": turns_of(
            len(ids),
            mask,
            row.get("turn_ends") or [],
            row.get("turn_rewards") or [],
            score.get("reward_by_turn") or [],
        ),
        "segments": [
            {
                "start": start,
                "num_read": len(history),
                "text": printable("".join(pieces.texts(history) or map(str, history)))[:CLIPPED],
            }
            for start, history in zip(row.get("segment_starts") or [], histories, strict=True)
        ],
    }


def _at(values: Sequence[float] | None, index: int) -> float | None:
    return _finite(values[index]) if values and index < len(values) else None


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; a number that is none is as good as missing on a page."""
    return value if value is not None and math.isfinite(value) else None


def _listed(files: RolloutFiles, tables: Tables, numbers: Sequence[int]) -> list[Row]:
    rows = take(tables.rollouts, LISTED, numbers)
    scores, used = _scores(files, tables, numbers, rows), _used(tables, rows)
    return [
        {
            "row": number,
            **_described(row, score, used.get(_place(row), [])),
            "prompt": printable(row["prompt"])[:CLIPPED],
            "response": printable(row["response"])[:CLIPPED],
            "is_clipped": len(row["response"]) > CLIPPED,
        }
        for number, row, score in zip(numbers, rows, scores, strict=True)
    ]


def _described(row: Row, score: Mapping[str, Any], roles: Sequence[Row]) -> Row:
    """What is said of a row, in a list and by itself."""
    answer = row["answer"]
    return {
        "prompt_id": row["prompt_id"],
        "step": row.get("step"),
        "sample_index": row["sample_index"],
        "greedy": row["greedy"],
        "answer": None if answer is None else printable(answer),
        "finish_reason": row["finish_reason"],
        "environment_reward": _finite(row["environment_reward"]),
        "length": len(row["response_ids"]),
        "reward": _finite(score.get("reward")),
        "by_source": [
            {"source": source, "score": _finite(value)}
            for source, value in score.get("by_source") or []
        ],
        "used": [
            {"role": each["role"], "advantage": _mean(each["advantages"], row.get("loss_mask"))}
            for each in roles
        ],
    }


def _mean(advantages: Sequence[float] | None, mask: Sequence[int] | None) -> float | None:
    given = advantages or []
    own = [v for v, kept in zip(given, mask or [1] * len(given), strict=False) if kept]
    return _finite(math.fsum(own) / len(own)) if own else None


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in PLACE)


def _scores(
    files: RolloutFiles, tables: Tables, numbers: Sequence[int], rows: Sequence[Row]
) -> list[Mapping[str, Any]]:
    """The scores of rows, row by row beside them; of one row alone also what its tokens have."""
    if tables.scores is None or not rows:
        return [{} for _ in rows]
    columns = (*SCORED, "ref_logprobs", "reward_by_turn") if "logprobs" in rows[0] else SCORED
    scores = take(tables.scores, columns, numbers)
    if any(_place(score) != _place(row) for score, row in zip(scores, rows, strict=True)):
        raise LockstepError(_other_rollouts(files))
    return list(scores)


def _other_rollouts(files: RolloutFiles) -> str:
    return (
        f"{files.scores} has the scores of other rollouts than {files.rollouts}: `lockstep run` "
        "brings them up to date"
    )


def _used(tables: Tables, rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """What the update used of these rows: each with its role and its advantages."""
    if tables.experience is None or not rows:
        return {}
    prompts = sorted({row["prompt_id"] for row in rows})
    columns = columns_in(tables.experience, USED)
    spans = possible(
        tables.experience,
        "prompt_id",
        lambda least, largest: any(least <= prompt <= largest for prompt in prompts),
    )
    if steps := {row["step"] for row in rows if "step" in row}:
        of_steps = possible(
            tables.experience,
            "step",
            lambda least, largest: any(least <= step <= largest for step in steps),
        )
        spans = common(spans, of_steps)
    used: dict[tuple[Any, ...], list[Row]] = {}
    known = pa.array(prompts)
    for span in spans:
        for batch in batches(tables.experience, columns, *span):
            for row in batch.filter(pc.is_in(batch["prompt_id"], value_set=known)).to_pylist():
                used.setdefault(_place(row), []).append(row)
    return used


def _sources(tables: Tables, start: int) -> list[str]:
    """The reward sources, as some rows have them: all rows have the same."""
    if tables.scores is None:
        return []
    some = take(tables.scores, ["by_source"], range(start, min(start + 16, tables.num_rows)))
    return list(dict.fromkeys(source for row in some for source, _ in row["by_source"]))
