"""Token sequences as padded tensors.

Shapes: B sequences, L tokens in the longest, T tokens in the longest response. A tensor over a
response, [B, T], starts at the response's first token and is padded on the right, whatever the
length of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Prompts with their responses, padded on the right."""

    ids: torch.Tensor
    """[B, L] prompt and response."""
    attention_mask: torch.Tensor
    """[B, L] 1 for a token, 0 for padding."""
    response_ids: torch.Tensor
    """[B, T]"""
    response_mask: torch.Tensor
    """[B, T] 1.0 for a response token, 0.0 for padding."""
    before: torch.Tensor
    """[B, T] position in `ids` of the token before each response token: where it is predicted."""
    last: torch.Tensor
    """[B] position in `ids` of the last token."""


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    device: str | torch.device = "cpu",
) -> Batch:
    """Pad sequences to the longest of them. Every prompt has at least one token."""
    ids = pad([[*p, *r] for p, r in zip(prompts, responses, strict=True)], pad_id, torch.long)
    response_ids = pad(responses, pad_id, torch.long)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    response_lengths = torch.tensor([len(response) for response in responses])
    lengths = prompt_lengths + response_lengths
    steps = torch.arange(response_ids.shape[1])
    before = (prompt_lengths[:, None] - 1 + steps).clamp(max=ids.shape[1] - 1)
    batch = Batch(
        ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        response_ids=response_ids,
        response_mask=(steps < response_lengths[:, None]).float(),
        before=before,
        last=lengths - 1,
    )
    return Batch(**{name: value.to(device) for name, value in vars(batch).items()})


def pad(
    rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, T] rows padded on the right."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), value, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
