"""Scoring given responses without gradients, micro-batch by micro-batch."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.context import Context, Stopped
from stages.data.batching import Batch
from stages.data.finite import check_finite, sample_name
from stages.data.schema import ResponseIds, RolloutRow
from stages.data.segments import Row, batch_of, is_segmented, num_read
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.packed import configure_forward, settings_for
from stages.engines.forward.packing import pack
from stages.engines.models.folders import pad_id
from stages.engines.processes.parts import UNIT_ROWS, Compute, Pass, collect, fill
from stages.engines.processes.shared_pass import Group, over_groups

ROUND_UNITS = 4
"""Units for each rank that joined ranks share the groups of at once: what a kill may cost. At the
end of so many, all wait for the last."""


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
    """The quantity of each row: a number, or a list as long as the row's response.

    Ranks that are joined share the rows, and all of them call it.
    """
    model = quantity.load()
    configure_forward(model, settings_for(ctx))
    groups = pack([row_length(row) for row in rows], ctx.micro_tokens)
    compute = lambda group: _of_group(ctx, model, rows, quantity, group)  # noqa: E731
    found = over_groups(ctx, groups, compute, quantity.phase)
    return _in_order(_by_row(found), quantity, range(len(rows)), lambda i: sample_name(rows[i]))


def kept_over_responses(
    ctx: Context, name: str, rows: Sequence[RolloutRow], quantity: Quantity
) -> list[Any]:
    """`over_responses`, in parts that outlive a kill.

    They lie under `name` and a hash of the rows and of the policy that sampled them: a stage that
    samples more than once never reads what it measured of another policy. Ranks share the rows and
    keep nothing.
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
        of_segments = [row["segment_starts"], row["segment_histories"]] if is_segmented(row) else []
        digest.update(json.dumps([*of_row, row["loss_mask"], *of_segments]).encode())
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
    have had another number. Ranks that are joined share these micro-batches, whose rows are of one
    unit: their results have the same bits.
    """
    name_of = describe or (lambda i: sample_name(rows[i]))

    def ready() -> Callable[[Group], list[Any]]:
        model = quantity.load()
        configure_forward(model, settings_for(ctx))
        return lambda group: _of_group(ctx, model, rows, quantity, group)

    def start() -> Compute:
        compute = ready()

        def of_unit(unit: range) -> list[Any]:
            found: list[tuple[Group, list[Any]]] = []
            for group in _groups(ctx, rows, unit):
                if ctx.should_stop_alone():
                    raise Stopped(f"stopped after {len(found)} batches of {quantity.phase}")
                found.append((group, compute(group)))
            return _in_order(_by_row(found), quantity, unit, name_of)

        return of_unit

    def together(units: Sequence[range]) -> Iterator[tuple[range, list[Any]]]:
        compute = ready()
        num_left = sum(map(len, units))
        at_once = ROUND_UNITS * ctx.world
        for start in range(0, len(units), at_once):
            some = units[start : start + at_once]
            groups = [group for unit in some for group in _groups(ctx, rows, unit)]
            num_before, num_left = len(rows) - num_left, num_left - sum(map(len, some))
            found = over_groups(
                ctx, groups, compute, quantity.phase, num_before=num_before, num_after=num_left
            )
            results = _by_row(found)
            for unit in some:
                yield unit, _in_order(results, quantity, unit, name_of)

    name = f"{name}-{ctx.micro_tokens}"
    return Pass(name, len(rows), UNIT_ROWS, start, phase=quantity.phase, together=together)


def _groups(ctx: Context, rows: Sequence[ResponseIds], unit: range) -> list[Group]:
    """The rows of a unit that go through the model together, by their numbers among all rows."""
    of_unit = rows[unit.start : unit.stop]
    packed = pack([row_length(row) for row in of_unit], ctx.micro_tokens)
    return [[unit.start + i for i in group] for group in packed]


def row_length(row: Row) -> int:
    """Tokens of a row that go through the model."""
    return num_read(row)


def _of_group(
    ctx: Context, model: Any, rows: Sequence[ResponseIds], quantity: Quantity, group: Group
) -> list[Any]:
    batch = response_batch(model, [rows[i] for i in group], ctx.device)
    with torch.no_grad():
        computed = quantity.compute(model, batch).tolist()
    return [
        values[: len(rows[i]["response_ids"])] if isinstance(values, list) else values
        for i, values in zip(group, computed, strict=True)
    ]


def _by_row(found: Iterable[tuple[Group, list[Any]]]) -> dict[int, Any]:
    return {i: one for group, some in found for i, one in zip(group, some, strict=True)}


def _in_order(
    results: Mapping[int, Any], quantity: Quantity, numbers: range, describe: Callable[[int], str]
) -> list[Any]:
    """Those of some rows; the first row that is wrong is named, whichever was computed first."""
    for index in numbers:
        check_finite(quantity.what, describe(index), results[index])
    return [results[index] for index in numbers]


def response_batch(model: Any, rows: Sequence[Row], device: str) -> Batch:
    """Responses as one batch for a model."""
    return batch_of(rows, pad_id(model), device)
