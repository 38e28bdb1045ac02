"""Scoring given responses without gradients, micro-batch by micro-batch."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stages.context import Context, Stopped
from stages.data.batching import Batch, collate
from stages.data.finite import check_finite, sample_name
from stages.engines.forward.packed import configure_forward, settings_for
from stages.engines.forward.packing import pack
from stages.engines.models.folders import pad_id
from stages.engines.processes.parts import UNIT_ROWS, Compute, Pass, collect, fill

Row = Mapping[str, Any]


def over_responses(
    ctx: Context,
    model: Any,
    rows: Sequence[Row],
    compute: Callable[[Batch], torch.Tensor],
    what: str = "what the model says",
    name_of: Callable[[Row], str] = sample_name,
) -> list[Any]:
    """`compute` of each row's prompt and response: a list with one entry per row.

    A [B] result gives numbers, a [B, T] result gives lists as long as the row's response, with
    zeros where its loss mask has them. `what`
    they are is for the message where one is not finite, which also says of which row.
    """
    done = 0

    def count(num_rows: int) -> None:
        nonlocal done
        done += num_rows
        ctx.progress(done, len(rows), _phase(what))

    return _compute(ctx, model, rows, compute, what, name_of, count)


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
    # In memory nothing is found but what this very step has put there.
    which = _digest(rows) if ctx.parts is None else len(rows)
    work = response_pass(ctx, f"{name}-{which}", rows, load, compute, what)
    fill(ctx, work)
    return collect(ctx, work)


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        of_row = [row["policy_hash"], row["prompt_ids"], row["response_ids"]]
        digest.update(json.dumps([*of_row, row.get("loss_mask")]).encode())
    return digest.hexdigest()[:16]


def response_pass(
    ctx: Context,
    name: str,
    rows: Sequence[Row],
    load: Callable[[], Any],
    compute: Callable[[Any, Batch], torch.Tensor],
    what: str,
    name_of: Callable[[Row], str] = sample_name,
    phase: str | None = None,
) -> Pass:
    """`over_responses` as a pass that shards share out: `compute` by the model that `load` loads.

    Which rows a unit has depends on no setting; within it they go through the model by length. As
    that changes the last bits, the tokens of a micro-batch are in the pass's name: an attempt may
    have had another number.
    """

    def start() -> Compute:
        model = load()

        def of_unit(unit: range) -> list[Any]:
            part = rows[unit.start : unit.stop]
            return _compute(ctx, model, part, partial(compute, model), what, name_of)

        return of_unit

    name = f"{name}-{ctx.micro_tokens}"
    return Pass(name, len(rows), UNIT_ROWS, start, phase=phase or _phase(what))


def _phase(what: str) -> str:
    """`the critic's value` of many rows: critic values."""
    owner, _, value = what.removeprefix("the ").rpartition("'s ")
    return f"{owner} {value}s".strip()


def row_length(row: Row) -> int:
    """Tokens of a row that go through the model."""
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _compute(
    ctx: Context,
    model: Any,
    rows: Sequence[Row],
    compute: Callable[[Batch], torch.Tensor],
    what: str,
    name_of: Callable[[Row], str],
    count: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """The results in the order of the rows; `count` is told how many rows more are done."""
    configure_forward(model, settings_for(ctx))
    results: dict[int, Any] = {}
    for group in pack([row_length(row) for row in rows], ctx.micro_tokens):
        if ctx.should_stop_alone():
            raise Stopped(f"stopped after {len(results)} of {len(rows)} responses")
        part = [rows[i] for i in group]
        batch = collate(
            [row["prompt_ids"] for row in part],
            [row["response_ids"] for row in part],
            pad_id(model),
            ctx.device,
            supports=[row.get("support") for row in part],
            loss_masks=[row.get("loss_mask") for row in part],
        )
        with torch.no_grad():
            computed = compute(batch).tolist()
        for index, row, values in zip(group, part, computed, strict=True):
            of_row = values[: len(row["response_ids"])] if isinstance(values, list) else values
            results[index] = of_row
        count(len(group))
    # The first row that is wrong is named, whichever went through the model first.
    for index, row in enumerate(rows):
        check_finite(what, name_of(row), results[index])
    return [results[index] for index in range(len(rows))]
