"""Token sequences as tensors: padded, and packed one after another without padding.

Shapes: B sequences, L tokens in the longest, T tokens in the longest response, N tokens and R
learnt tokens in all. A tensor over a response, [B, T], starts at the response's first token and
is padded on the right, whatever the length of the prompt.

A response may hold tokens that the model did not say itself, such as what a tool answered between
two turns: its loss mask has 0 there. They are read like any other, and are never learnt from: no
log-prob of theirs is computed, and what is [B, T] has zeros for them as it has for padding.

A GPU is sent the tokens and their lengths, and works out where each of them is. It is asked for
nothing: each answer would make the process wait for all that the GPU has still to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """The tokens that each learnt token was drawn from: most have few, so they are not padded.

    They stay on the CPU until a chunk of them is asked for.
    """

    ids: Tensor
    """All of them, token after token and response after response."""
    sizes: Tensor
    """How many belong to each learnt token."""

    def chunks(self, num_tokens: int, device: Any = "cpu") -> Iterator[Tensor]:
        """[n, K] the ids of `num_tokens` learnt tokens at a time, padded with -1."""
        of_chunks = torch.split(self.sizes, num_tokens)
        all_ids = torch.split(self.ids, [int(sizes.sum()) for sizes in of_chunks])
        for sizes, ids in zip(of_chunks, all_ids, strict=True):
            width = int(sizes.max()) if len(sizes) else 0
            filled = torch.arange(width) < sizes[:, None]
            padded = torch.full(filled.shape, -1, dtype=torch.long)
            padded[filled] = ids.long()
            yield to_device(padded, device)


@dataclass(frozen=True)
class Packed:
    """The tokens of a batch one after another, and where each is in the padded tensors."""

    ids: Tensor
    """[N]"""
    positions: Tensor
    """[N] place of each token in its sequence."""
    starts: Tensor
    """[B + 1] int32: where each sequence starts, and the last one ends."""
    longest: int
    """Tokens of the longest sequence."""
    at: Tensor
    """[N] index of each token in [B, L], flattened."""
    predicting: Tensor
    """[R] index among the N of the token before each learnt token: where it is predicted."""
    responding: Tensor
    """[R] index of each learnt token in [B, T], flattened."""


@dataclass(frozen=True)
class Batch:
    """Prompts with their responses, padded on the right."""

    ids: Tensor
    """[B, L] prompt and response."""
    attention_mask: Tensor
    """[B, L] 1 for a token, 0 for padding."""
    response_ids: Tensor
    """[B, T]"""
    response_mask: Tensor
    """[B, T] 1.0 for a response token, 0.0 for padding."""
    loss_mask: Tensor
    """[B, T] 1.0 for a response token that is learnt from, 0.0 for all others and for padding."""
    before: Tensor
    """[B, T] position in `ids` of the token before each response token: where it is predicted."""
    last: Tensor
    """[B] position in `ids` of the last token."""
    packed: Packed
    """The same tokens without padding."""
    support: Support | None = None
    """What each learnt token was drawn from; None: the whole vocabulary."""


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    device: str | torch.device = "cpu",
    supports: Sequence[Sequence[Sequence[int]] | None] | None = None,
    loss_masks: Sequence[Sequence[int] | None] | None = None,
) -> Batch:
    """Pad sequences to the longest of them. Every prompt has at least one token.

    `supports` are the tokens that each token of a response was drawn from, where some were cut off:
    for all responses or for none. A loss mask says with 1 which tokens of a response are learnt
    from; without one, all are.
    """
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    ids = to_device(_in_a_row(parts, np.int64), device)
    prompt_lengths, response_lengths = (
        to_device(lengths_of(rows), device) for rows in (prompts, responses)
    )
    lengths = prompt_lengths + response_lengths
    ends = lengths.cumsum(0)
    starts = ends - lengths
    row, positions = _places(lengths, len(ids))
    width = max((len(p) + len(r) for p, r in zip(prompts, responses, strict=True)), default=0)
    at = row * width + positions

    steps = max(map(len, responses), default=0)
    of, step = _places(response_lengths, sum(map(len, responses)))
    first = ends - response_lengths
    response_tokens, responding = first[of] + step, of * steps + step
    in_row, in_response = torch.arange(width, device=device), torch.arange(steps, device=device)
    is_token = in_row < lengths[:, None]
    is_said = in_response < response_lengths[:, None]
    masks = whole_masks(responses, loss_masks)
    learnt = is_said.float() if masks is None else to_device(pad(masks, 0.0), device)
    if masks is not None:
        kept = to_device(_in_a_row(masks, np.int64).nonzero().squeeze(1), device)
        response_tokens, responding = response_tokens[kept], responding[kept]
    return Batch(
        ids=_where(is_token, ids, starts[:, None] + in_row, pad_id),
        attention_mask=is_token.long(),
        response_ids=_where(is_said, ids, first[:, None] + in_response, pad_id),
        response_mask=is_said.float(),
        loss_mask=learnt,
        before=(prompt_lengths[:, None] - 1 + in_response).clamp(max=width - 1),
        last=lengths - 1,
        packed=Packed(
            ids=ids,
            positions=positions,
            starts=torch.cat([ends.new_zeros(1), ends]).int(),
            longest=width,
            at=at,
            predicting=response_tokens - 1,
            responding=responding,
        ),
        support=_support(supports or (), responses, masks),
    )


def whole_masks(
    responses: Sequence[Sequence[int]], loss_masks: Sequence[Sequence[int] | None] | None
) -> list[Sequence[int]] | None:
    """The loss mask of each response, whole; None where nothing is masked."""
    if loss_masks is None or all(mask is None for mask in loss_masks):
        return None
    masks = [
        [1] * len(response) if mask is None else mask
        for response, mask in zip(responses, loss_masks, strict=True)
    ]
    for row, (response, mask) in enumerate(zip(responses, masks, strict=True)):
        if len(mask) != len(response) or not set(mask) <= {0, 1}:
            raise ValueError(f"response {row}: a loss mask has a 0 or a 1 for each of its tokens")
    return masks


def loss_mask(row: Mapping[str, Any], ids: str = "response_ids") -> list[int]:
    """Of a row of the data: 1 for each token of its response that is learnt from."""
    mask: list[int] | None = row.get("loss_mask")
    return [1] * len(row[ids]) if mask is None else mask


def loss_masks_of(rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """[B, T] 1.0 for a token of a row's response that is learnt from, 0.0 for all else."""
    if all(row.get("loss_mask") is None for row in rows):
        lengths = lengths_of([row["response_ids"] for row in rows])
        return (torch.arange(_longest(lengths)) < lengths[:, None]).float()
    return pad([loss_mask(row) for row in rows], 0.0)


def pad(
    rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[B, T] rows padded on the right."""
    lengths = lengths_of(rows)
    padded = torch.full((len(rows), _longest(lengths)), value, dtype=dtype)
    filled = torch.arange(padded.shape[1]) < lengths[:, None]
    return padded.masked_scatter_(filled, _in_a_row(rows, np.float64).to(dtype))


def lengths_of(rows: Sequence[Sequence[Any]]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.long)


def to_device(tensor: Tensor, device: Any) -> Tensor:
    """A copy there that nobody waits for: the memory it is read from stays where it is."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0


def _in_a_row(rows: Sequence[Sequence[float]], kind: Any) -> Tensor:
    """[N] the numbers of all rows, one row after another."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), kind, sum(map(len, rows))))


def _places(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """[N] the row that each of `total` numbers is of, and its place there."""
    row = torch.repeat_interleave(lengths, output_size=total)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(total, device=lengths.device) - starts[row]


def _where(is_there: Tensor, values: Tensor, at: Tensor, otherwise: int) -> Tensor:
    """`values[at]` where there is such a thing."""
    return values[at.clamp(max=len(values) - 1)].masked_fill(~is_there, otherwise)


def _support(
    supports: Sequence[Sequence[Sequence[int]] | None],
    responses: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None,
) -> Support | None:
    given: Sequence[Sequence[Sequence[int]]]
    given = [support for support in supports if support is not None]
    if not given:
        return None
    if [len(support) for support in given] != [len(response) for response in responses]:
        raise ValueError("a support belongs to every token of every response, or to none")
    if masks is not None:
        given, responses = _only(masks, given), _only(masks, responses)
    for row, (support, response) in enumerate(zip(given, responses, strict=True)):
        if not all(token in kept for token, kept in zip(response, support, strict=True)):
            raise ValueError(f"response {row} has a token that is not in its support")
    of_tokens = [kept for support in given for kept in support]
    return Support(
        ids=torch.tensor([token for kept in of_tokens for token in kept], dtype=torch.int32),
        sizes=torch.tensor([len(kept) for kept in of_tokens]),
    )


def _only(masks: Sequence[Sequence[int]], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [
        [value for value, kept in zip(row, mask, strict=True) if kept]
        for row, mask in zip(rows, masks, strict=True)
    ]
