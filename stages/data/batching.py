"""Token sequences as padded tensors.

Shapes: B sequences, L tokens in the longest, T tokens in the longest response. A tensor over a
response, [B, T], starts at the response's first token and is padded on the right, whatever the
length of the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Support:
    """The tokens that each response token was drawn from: most have few, so they are not padded."""

    ids: torch.Tensor
    """All of them, token after token and response after response."""
    sizes: torch.Tensor
    """How many belong to each response token."""

    def to(self, device: str | torch.device) -> "Support":
        return Support(self.ids.to(device), self.sizes.to(device))

    def chunks(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """[n, K] the ids of `num_tokens` response tokens at a time, padded with -1."""
        of_chunks = torch.split(self.sizes, num_tokens)
        all_ids = torch.split(self.ids, [int(sizes.sum()) for sizes in of_chunks])
        for sizes, ids in zip(of_chunks, all_ids, strict=True):
            width = int(sizes.max()) if len(sizes) else 0
            filled = torch.arange(width, device=sizes.device) < sizes[:, None]
            padded = torch.full(filled.shape, -1, dtype=torch.long, device=ids.device)
            padded[filled] = ids.long()
            yield padded


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
    support: Support | None = None
    """What each response token was drawn from; None: the whole vocabulary."""


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    device: str | torch.device = "cpu",
    supports: Sequence[Sequence[Sequence[int]] | None] | None = None,
) -> Batch:
    """Pad sequences to the longest of them. Every prompt has at least one token.

    `supports` are the tokens that each token of a response was drawn from, where some were cut off:
    for all responses or for none.
    """
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
        support=_support(supports or (), responses),
    )
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    return Batch(**{name: value.to(device) for name, value in tensors.items()})


def pad(
    rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, T] rows padded on the right."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), value, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def _support(
    supports: Sequence[Sequence[Sequence[int]] | None], responses: Sequence[Sequence[int]]
) -> Support | None:
    given = [support for support in supports if support is not None]
    if not given:
        return None
    if [len(support) for support in given] != [len(response) for response in responses]:
        raise ValueError("a support belongs to every token of every response, or to none")
    for row, (support, response) in enumerate(zip(given, responses, strict=True)):
        if not all(token in kept for token, kept in zip(response, support, strict=True)):
            raise ValueError(f"response {row} has a token that is not in its support")
    of_tokens = [kept for support in given for kept in support]
    return Support(
        ids=torch.tensor([token for kept in of_tokens for token in kept], dtype=torch.int32),
        sizes=torch.tensor([len(kept) for kept in of_tokens]),
    )
