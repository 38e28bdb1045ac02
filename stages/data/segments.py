"""Segments of a response: what a model reads before each of its tokens.

Most responses have one: a token's context is the prompt and all tokens of the response before it.
An episode whose old observations were elided (environments/elision.py) has several. From each of
its `segment_starts` on, the context is the prompt, a shortened history in place of all before, and
the tokens from there. A response stays one row, so that whatever is said of a response (its reward,
its advantages, its place in a group) knows nothing of segments; only what puts it through a model
does.

A segment ends with the last token that is learnt from in it: what was observed after that is read
in the next one, if at all. So none is longer than the context that was sampled from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from stages.data.batching import Batch, collate, loss_mask, pad, to_device

Row = Mapping[str, Any]
"""At least prompt_ids and response_ids."""
R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Piece:
    """Some of a response's tokens in a row of their own, with what is read before them."""

    of: int
    """The number of the row that it is a piece of."""
    start: int
    """Where in that row's response its own begins."""
    row: Row
    """What a model reads; without segments where it is a piece of several."""


def is_segmented(row: Row) -> bool:
    return bool(row.get("segment_starts"))


def pieces_of(row: Row, of: int = 0) -> list[Piece]:
    """A row segment by segment; the row itself where it has one."""
    if not is_segmented(row):
        return [Piece(of, 0, row)]
    mask = loss_mask(row)
    starts = [0, *row["segment_starts"]]
    histories = [(), *row["segment_histories"]]
    stops = [_after_the_last_own(mask, start) for start in starts[1:]]
    return [
        Piece(of, start, _part(row, history, start, stop))
        for start, stop, history in zip(starts, [*stops, len(mask)], histories, strict=True)
    ]


def cut(
    rows: Sequence[Row], numbers: Sequence[int], *, whole: bool = False
) -> tuple[list[Piece], list[range]]:
    """Some rows in pieces, and which of the pieces each of them has; `whole`: one, of all of it."""
    pieces: list[Piece] = []
    of_rows: list[range] = []
    for of in numbers:
        start = len(pieces)
        pieces += [Piece(of, 0, rows[of])] if whole else pieces_of(rows[of], of)
        of_rows.append(range(start, len(pieces)))
    return pieces, of_rows


def num_read(row: Row) -> int:
    """Tokens of a row that go through a model."""
    return sum(
        len(piece.row["prompt_ids"]) + len(piece.row["response_ids"]) for piece in pieces_of(row)
    )


def as_last_read(row: R) -> R:
    """A row as it is read at its end: in place of what is before the last segment, its history."""
    if not is_segmented(row):
        return row
    last = row["response_ids"][row["segment_starts"][-1] :]
    whole = [*row["segment_histories"][-1], *last]
    return cast(R, {**_unsegmented(row), "response_ids": whole, "support": None, "loss_mask": None})


def batch_of(rows: Sequence[Row], pad_id: int, device: str | torch.device = "cpu") -> Batch:
    """Responses as one batch for a model. What is [B, T] has a row for each, whatever its segments;
    what is [B, L] has one for each segment."""
    pieces = [piece for of, row in enumerate(rows) for piece in pieces_of(row, of)]
    batch = collate(
        [piece.row["prompt_ids"] for piece in pieces],
        [piece.row["response_ids"] for piece in pieces],
        pad_id,
        device,
        supports=[piece.row.get("support") for piece in pieces],
        loss_masks=[piece.row.get("loss_mask") for piece in pieces],
    )
    return batch if len(pieces) == len(rows) else _by_row(batch, rows, pieces, pad_id)


def _by_row(batch: Batch, rows: Sequence[Row], pieces: Sequence[Piece], pad_id: int) -> Batch:
    device = batch.ids.device
    responses = [row["response_ids"] for row in rows]
    num_steps, width = max(map(len, responses)), batch.response_ids.shape[1]
    offsets = torch.tensor([piece.of * num_steps + piece.start for piece in pieces])
    piece, step = batch.packed.responding // width, batch.packed.responding % width
    of_rows = (
        pad(responses, pad_id, torch.long),
        pad([[1] * len(ids) for ids in responses], 0.0),
        pad([loss_mask(row) for row in rows], 0.0),
    )
    response_ids, response_mask, learnt = (to_device(each, device) for each in of_rows)
    return replace(
        batch,
        response_ids=response_ids,
        response_mask=response_mask,
        loss_mask=learnt,
        # A row has several of each: whoever asks for one finds none.
        before=batch.before.new_empty(0),
        last=batch.last.new_empty(0),
        packed=replace(batch.packed, responding=to_device(offsets, device)[piece] + step),
    )


def _part(row: Row, history: Sequence[int], start: int, stop: int) -> Row:
    support, mask = row.get("support"), row["loss_mask"]
    return {
        **_unsegmented(row),
        "prompt_ids": [*row["prompt_ids"], *history],
        "response_ids": row["response_ids"][start:stop],
        "loss_mask": mask[start:stop],
        "support": None if support is None else support[start:stop],
    }


def _unsegmented(row: Row) -> dict[str, Any]:
    return {**row, "segment_starts": [], "segment_histories": []}


def _after_the_last_own(mask: Sequence[int], start: int) -> int:
    stop = start
    while stop and not mask[stop - 1]:
        stop -= 1
    return stop
