"""Scoring given responses without gradients, micro-batch by micro-batch."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.context import Context, Stopped
from stages.data.batching import Batch, collate
from stages.data.finite import check_finite, sample_name
from stages.data.schema import ResponseIds, RolloutRow
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.packed import configure_forward, settings_for
from stages.engines.forward.packing import pack
from stages.engines.models.folders import pad_id
from stages.engines.processes.parts import UNIT_ROWS, Compute, Pass, collect, fill


@dataclass(frozen=True)
class Quantity:
    """What a model computes of each response: one number, or one per token."""

    what: str
    """One value, for the message where it is not finite: `the critic's value`."""
    phase: str
    """All of them, for progress: `critic values`."""
    load: Callable[[], Any]
    """The model."""
    compute: Callable[[Any, Batch], torch.Tensor]
    """[B], or [B, T] with zeros where a loss mask has them, by the model."""


def logprobs_by(owner: str, load: Callable[[], Any], temperature: float) -> Quantity:
    """The log-probs of the response's tokens under a policy: the `trainer`, the `reference`."""
    return Quantity(
        f"the {owner}'s log-prob",
        f"{owner} log-probs",
        load,
        lambda policy, batch: response_logprobs(policy, batch, temperature).logprobs,
    )


def over_responses(ctx: Context, rows: Sequence[ResponseIds], quantity: Quantity) -> list[Any]:
    """The quantity of each row: a number, or a list as long as the row's response."""
    done = 0

    def count(num_rows: int) -> None:
        nonlocal done
        done += num_rows
        ctx.progress(done, len(rows), quantity.phase)

    describe = lambda i: sample_name(rows[i])  # noqa: E731
    return _compute(ctx, quantity.load(), rows, quantity, describe, count)


def kept_over_responses(
    ctx: Context, name: str, rows: Sequence[RolloutRow], quantity: Quantity
) -> list[Any]:
    """`over_responses`, in parts that outlive a kill.

    They lie under `name` and a hash of the rows and of the policy that sampled them: a stage that
    samples more than once never reads what it measured of another policy. Ranks each compute all
    rows, and keep nothing: who reads what another one wrote would depend on who was faster.
    """
    if ctx.world > 1:
        return over_responses(ctx, rows, quantity)
    # In memory nothing is found but what this very step has put there.
    which = _digest(rows) if ctx.parts is None else len(rows)
    work = response_pass(ctx, f"{name}-{which}", rows, quantity)
    fill(ctx, work)
    return collect(ctx, work)


def _digest(rows: Sequence[RolloutRow]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        of_row = [row["policy_hash"], row["prompt_ids"], row["response_ids"]]
        digest.update(json.dumps([*of_row, row["loss_mask"]]).encode())
    return digest.hexdigest()[:16]


def response_pass(
    ctx: Context,
    name: str,
    rows: Sequence[ResponseIds],
    quantity: Quantity,
    describe: Callable[[int], str] | None = None,
) -> Pass:
    """`over_responses` as a pass that shards share out; `describe` names a row by its number.

    Which rows a unit has depends on no setting; within it they go through the model by length. As
    that changes the last bits, the tokens of a micro-batch are in the pass's name: an attempt may
    have had another number.
    """
    name_of = describe or (lambda i: sample_name(rows[i]))

    def start() -> Compute:
        model = quantity.load()
        return lambda unit: _compute(
            ctx,
            model,
            rows[unit.start : unit.stop],
            quantity,
            lambda i: name_of(unit.start + i),
        )

    name = f"{name}-{ctx.micro_tokens}"
    return Pass(name, len(rows), UNIT_ROWS, start, phase=quantity.phase)


def row_length(row: ResponseIds) -> int:
    """Tokens of a row that go through the model."""
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _compute(
    ctx: Context,
    model: Any,
    rows: Sequence[ResponseIds],
    quantity: Quantity,
    describe: Callable[[int], str],
    count: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """The results in the order of the rows; `count` gets the number of rows of each batch."""
    configure_forward(model, settings_for(ctx))
    results: dict[int, Any] = {}
    for group in pack([row_length(row) for row in rows], ctx.micro_tokens):
        if ctx.should_stop_alone():
            raise Stopped(f"stopped after {len(results)} of {len(rows)} responses")
        batch = response_batch(model, [rows[i] for i in group], ctx.device)
        with torch.no_grad():
            computed = quantity.compute(model, batch).tolist()
        for index, values in zip(group, computed, strict=True):
            length = len(rows[index]["response_ids"])
            results[index] = values[:length] if isinstance(values, list) else values
        count(len(group))
    # The first row that is wrong is named, whichever went through the model first.
    for index in range(len(rows)):
        check_finite(quantity.what, describe(index), results[index])
    return [results[index] for index in range(len(rows))]


def response_batch(model: Any, rows: Sequence[ResponseIds], device: str) -> Batch:
    """Responses as one batch for a model."""
    return collate(
        [row["prompt_ids"] for row in rows],
        [row["response_ids"] for row in rows],
        pad_id(model),
        device,
        supports=[row["support"] for row in rows],
        loss_masks=[row["loss_mask"] for row in rows],
    )
