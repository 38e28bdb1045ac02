"""Scoring given responses without gradients, micro-batch by micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stages.context import Context, Stopped
from stages.data.batching import Batch, collate
from stages.engines.models import pad_id

Row = Mapping[str, Any]


@torch.no_grad()
def over_responses(
    ctx: Context,
    model: Any,
    rows: Sequence[Row],
    compute: Callable[[Batch], torch.Tensor],
    *,
    finished: tuple[int, int] = (0, 1),
) -> list[Any]:
    """`compute` of each row's prompt and response: a list with one entry a row.

    A [B] result gives numbers, a [B, T] result gives lists as long as the row's response. The
    progress line says that `finished[0]` of `finished[1]` such passes were done before.
    """
    passes, of = finished
    results: list[Any] = []
    for start in range(0, len(rows), ctx.micro_batch):
        if ctx.should_stop():
            raise Stopped(f"stopped after {start} of {len(rows)} responses")
        part = rows[start : start + ctx.micro_batch]
        batch = collate(
            [row["prompt_ids"] for row in part],
            [row["response_ids"] for row in part],
            pad_id(model),
            ctx.device,
        )
        for row, values in zip(part, compute(batch).tolist(), strict=True):
            is_list = isinstance(values, list)
            results.append(values[: len(row["response_ids"])] if is_list else values)
        ctx.progress(passes * len(rows) + len(results), of * len(rows))
    return results
