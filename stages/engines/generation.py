"""Sampling responses with plain torch: left padding, a key/value cache, counter-based randomness.

The random number that picks the token at a position is a hash of (the sample's seed, the position),
so a sample does not depend on its neighbours in the batch, nor on how many there are.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.engines.generator import Completion, Request, Sampling
from stages.engines.models import end_ids, pad_id


@torch.inference_mode()
def generate(
    policy: Any, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling
) -> list[Completion]:
    """Complete all requests in one batch."""
    device = policy.device
    ids, mask = _left_padded([request.prompt_ids for request in requests], pad_id(policy), device)
    greedy = torch.tensor([request.seed is None for request in requests], device=device)
    seeds = torch.tensor([request.seed or 0 for request in requests], device=device)
    ends = torch.tensor(sorted(end_ids(policy)), device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    running = torch.ones(len(requests), dtype=torch.bool, device=device)
    tokens, logprobs, entropies, emitted = [], [], [], []
    supports: list[list[list[int]]] = [[] for _ in requests]
    cache, inputs = None, ids
    for step in range(max_new_tokens):
        output = policy(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        logits = output.logits[:, -1].float() / sampling.temperature
        distribution = torch.log_softmax(logits, dim=-1)
        if sampling.cuts:
            kept = within_support(distribution, sampling)
            distribution = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), dim=-1)
            _append(supports, kept, running)
        drawn = _inverse_cdf(distribution, uniforms(seeds, step))
        token = torch.where(greedy, distribution.argmax(-1), drawn)

        tokens.append(token)
        logprobs.append(distribution.gather(-1, token[:, None]).squeeze(-1))
        # A token that was cut off adds 0 times something finite.
        finite = distribution.clamp(min=torch.finfo(distribution.dtype).min)
        entropies.append(-(distribution.exp() * finite).sum(-1))
        emitted.append(running)
        running = running & ~torch.isin(token, ends)
        if not running.any():
            break
        inputs, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)

    lengths = torch.stack(emitted, 1).sum(1).tolist()
    all_tokens, all_logprobs = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    entropy = (torch.stack(entropies, 1) * torch.stack(emitted, 1)).sum(1).tolist()
    cut = running.tolist()
    return [
        Completion(
            ids=all_tokens[i][: lengths[i]],
            logprobs=all_logprobs[i][: lengths[i]],
            entropy=entropy[i],
            finish_reason="length" if cut[i] else "stop",
            support=supports[i] if sampling.cuts else None,
        )
        for i in range(len(requests))
    ]


def within_support(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] whether a token is left after the cuts; the likeliest always is."""
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.min_p > 0:
        kept &= ranked >= ranked[:, :1] + math.log(sampling.min_p)
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        # The tokens that are kept so far are the first ones: the total is theirs.
        cumulative = _masses(ranked).masked_fill(~kept, 0).cumsum(-1)
        likelier = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        kept &= likelier < sampling.top_p * cumulative[:, -1:].double()
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def _append(supports: list[list[list[int]]], kept: Tensor, running: Tensor) -> None:
    """Add this step's support to the rows that still run."""
    rows = running.nonzero().squeeze(-1)
    of_rows = kept[rows]
    ids = of_rows.nonzero()[:, 1].tolist()
    start = 0
    for row, size in zip(rows.tolist(), of_rows.sum(-1).tolist(), strict=True):
        supports[row].append(ids[start : start + size])
        start += size


def uniforms(seeds: Tensor, position: int) -> Tensor:
    """[B] numbers in [0, 1), float64: a hash of each int64 seed and the position (splitmix64)."""
    bits = seeds + _signed(0x9E3779B97F4A7C15 * (position + 1))
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift_right(bits, 31)
    uniform: Tensor = _shift_right(bits, 11).double() / 2.0**53
    return uniform


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: int64 arithmetic wraps around as unsigned does."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """A logical shift: zeros come in from the left, whatever the sign."""
    shifted: Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted


def _inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """[B] the token at which the cumulative probability passes the uniform number."""
    cumulative = _masses(logprobs).cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=logprobs.shape[-1] - 1)


def _masses(logprobs: Tensor) -> Tensor:
    """[B, V] probabilities in units of 2^-52, as integers.

    Their sums are exact in any order, which those of floating point on a GPU are not.
    """
    masses: Tensor = (logprobs.double().exp() * 2.0**52).round().long()
    return masses


def _left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    return ids, mask
