"""Scoring given responses without gradients, micro-batch by micro-batch."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stages.context import Context, Stopped
from stages.data.batching import Batch, collate
from stages.data.finite import check_finite, sample_name
from stages.engines.models import pad_id
from stages.engines.parts import Compute, Pass, collect, fill

UNIT_ROWS = 256
"""About how many rows a unit has: what a kill may cost, and the least that a shard takes on."""
Row = Mapping[str, Any]


def over_responses(
    ctx: Context,
    model: Any,
    rows: Sequence[Row],
    compute: Callable[[Batch], torch.Tensor],
    what: str = "what the model says",
    name_of: Callable[[Row], str] = sample_name,
) -> list[Any]:
    """`compute` of each row's prompt and response: a list with one entry a row.

    A [B] result gives numbers, a [B, T] result gives lists as long as the row's response. `what`
    they are is for the message where one is not finite, which also says of which row.
    """
    results: list[Any] = []
    for values in _micro_batches(ctx, model, rows, compute, what, name_of):
        results += values
        ctx.progress(len(results), len(rows))
    return results


def kept_over_responses(
    ctx: Context,
    name: str,
    rows: Sequence[Row],
    load: Callable[[], Any],
    compute: Callable[[Any, Batch], torch.Tensor],
    what: str,
) -> list[Any]:
    """`over_responses` by the model that `load` loads, in parts that outlive a kill.

    They lie under `name` and a hash of the rows and of the policy that sampled them: a stage that
    samples more than once never reads what it measured of another policy. Ranks each compute all
    rows, and keep nothing: who reads what another one wrote would depend on who was faster.
    """
    if ctx.world > 1:
        model = load()
        return over_responses(ctx, model, rows, partial(compute, model), what)
    work = response_pass(ctx, f"{name}-{_digest(rows)}", rows, load, compute, what)
    fill(ctx, work)
    return collect(ctx, work)


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps([row["policy_hash"], row["prompt_ids"], row["response_ids"]]).encode()
        )
    return digest.hexdigest()[:16]


def response_pass(
    ctx: Context,
    name: str,
    rows: Sequence[Row],
    load: Callable[[], Any],
    compute: Callable[[Any, Batch], torch.Tensor],
    what: str,
    name_of: Callable[[Row], str] = sample_name,
) -> Pass:
    """`over_responses` as a pass that shards share out: `compute` by the model that `load` loads.

    A unit is a whole number of micro-batches, so that the rows that are padded together, and with
    them the rounding, are the same as in one go. The micro-batch is in the pass's name because an
    attempt may have had another one.
    """

    def start() -> Compute:
        model = load()

        def of_unit(unit: range) -> list[Any]:
            part = rows[unit.start : unit.stop]
            batches = _micro_batches(ctx, model, part, partial(compute, model), what, name_of)
            return [value for values in batches for value in values]

        return of_unit

    unit_rows = max(1, UNIT_ROWS // ctx.micro_batch) * ctx.micro_batch
    return Pass(f"{name}-{ctx.micro_batch}", len(rows), unit_rows, start)


def _micro_batches(
    ctx: Context,
    model: Any,
    rows: Sequence[Row],
    compute: Callable[[Batch], torch.Tensor],
    what: str,
    name_of: Callable[[Row], str],
) -> Iterator[list[Any]]:
    for start in range(0, len(rows), ctx.micro_batch):
        if ctx.should_stop_alone():
            raise Stopped(f"stopped after {start} of {len(rows)} responses")
        part = rows[start : start + ctx.micro_batch]
        batch = collate(
            [row["prompt_ids"] for row in part],
            [row["response_ids"] for row in part],
            pad_id(model),
            ctx.device,
            supports=[row.get("support") for row in part],
        )
        with torch.no_grad():
            computed = compute(batch).tolist()
        of_rows = [
            values[: len(row["response_ids"])] if isinstance(values, list) else values
            for row, values in zip(part, computed, strict=True)
        ]
        for row, values in zip(part, of_rows, strict=True):
            check_finite(what, name_of(row), values)
        yield of_rows
