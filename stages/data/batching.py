"""Token sequences as tensors: padded, and packed one after another without padding.

Shapes: B sequences, L tokens in the longest, T tokens in the longest response, N tokens and R
learnt tokens in all. A tensor over a response, [B, T], starts at the response's first token and
is padded on the right, whatever the length of the prompt.

A response may hold tokens that the model did not say itself, such as what a tool answered between
two turns: its loss mask has 0 there. They are read like any other, and are never learnt from: no
log-prob of theirs is computed, and what is [B, T] has zeros for them as it has for padding.

What a step needs to know of its lengths is worked out here, where they are: asked of a GPU, each
number would make the process wait for all that the GPU has still to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

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
    ids = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long)
    prompt_lengths, response_lengths = (
        torch.tensor([len(row) for row in rows], dtype=torch.long) for rows in (prompts, responses)
    )
    lengths = prompt_lengths + response_lengths
    ends = lengths.cumsum(0)
    row = torch.repeat_interleave(lengths)
    positions = torch.arange(len(ids)) - (ends - lengths)[row]
    width, steps = _longest(lengths), _longest(response_lengths)
    at = row * width + positions

    step = positions - prompt_lengths[row]
    said = (step >= 0).nonzero().squeeze(1)
    responding = row[said] * steps + step[said]
    in_response = torch.arange(steps)
    response_mask = (in_response < response_lengths[:, None]).float()
    masks = whole_masks(responses, loss_masks)
    learnt = response_mask if masks is None else pad(masks, 0.0)
    kept = slice(None) if masks is None else learnt.flatten()[responding] > 0
    batch = Batch(
        ids=_spread(ids, at, (len(lengths), width), pad_id),
        attention_mask=(torch.arange(width) < lengths[:, None]).long(),
        response_ids=_spread(ids[said], responding, (len(lengths), steps), pad_id),
        response_mask=response_mask,
        loss_mask=learnt,
        before=(prompt_lengths[:, None] - 1 + in_response).clamp(max=width - 1),
        last=lengths - 1,
        packed=Packed(
            ids=ids,
            positions=positions,
            starts=torch.cat([ends.new_zeros(1), ends]).int(),
            longest=width,
            at=at,
            predicting=said[kept] - 1,
            responding=responding[kept],
        ),
        support=_support(supports or (), responses, masks),
    )
    moved: Batch = _moved(batch, device)
    return moved


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


def pad(
    rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[B, T] rows padded on the right."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    padded = torch.full((len(rows), _longest(lengths)), value, dtype=dtype)
    filled = torch.arange(padded.shape[1]) < lengths[:, None]
    padded[filled] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return padded


def to_device(tensor: Tensor, device: Any) -> Tensor:
    """A copy there that nobody waits for: the memory it is read from stays where it is."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0


def _spread(values: Tensor, at: Tensor, shape: tuple[int, int], otherwise: int) -> Tensor:
    spread = torch.full(shape, otherwise, dtype=values.dtype)
    spread.view(-1)[at] = values
    return spread


def _moved(value: Any, device: Any) -> Any:
    """The tensors in a dataclass moved, those of a support left."""
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, Batch | Packed):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{name: _moved(part, device) for name, part in parts.items()})
    return value


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
