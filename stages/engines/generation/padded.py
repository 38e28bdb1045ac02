"""Sampling responses from any causal model: one batch, left padding, the library's own cache.

Every sequence is decoded until the last one has ended: `decoding.py` does better for the families
that it knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.engines.generation.drawing import GREEDY, add_supports, draw, uniforms
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.models.folders import end_ids, pad_id


@torch.inference_mode()
def generate(
    policy: Any, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling
) -> list[Completion]:
    """Complete all requests in one batch."""
    device = policy.device
    ids, mask = _left_padded([request.prompt_ids for request in requests], pad_id(policy), device)
    greedy = torch.tensor([request.seed is None for request in requests], device=device)
    seeds = torch.tensor([request.seed or 0 for request in requests], device=device)
    ends = torch.tensor(sorted(end_ids(policy) | set(sampling.stop_ids)), device=device)
    limits = torch.tensor([each.limit(max_new_tokens) for each in requests], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    running = torch.ones(len(requests), dtype=torch.bool, device=device)
    cut = torch.zeros_like(running)
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
        uniform = uniforms(seeds, step).masked_fill(greedy, GREEDY)
        drawn = draw(output.logits[:, -1], uniform, sampling)
        if drawn.kept is not None:
            rows = running.nonzero().squeeze(-1)
            add_supports([supports[row] for row in rows.tolist()], drawn.kept[rows])
        tokens.append(drawn.tokens)
        logprobs.append(drawn.logprobs)
        entropies.append(drawn.entropies)
        emitted.append(running)
        running = running & ~torch.isin(drawn.tokens, ends)
        cut = cut | (running & (step + 1 >= limits))
        running = running & ~cut
        if not running.any():
            break
        inputs, positions = drawn.tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)

    lengths = torch.stack(emitted, 1).sum(1).tolist()
    all_tokens, all_logprobs = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    entropy = (torch.stack(entropies, 1) * torch.stack(emitted, 1)).sum(1).tolist()
    was_cut = cut.tolist()
    return [
        Completion(
            ids=all_tokens[i][: lengths[i]],
            logprobs=all_logprobs[i][: lengths[i]],
            entropy=entropy[i],
            finish_reason="length" if was_cut[i] else "stop",
            support=supports[i] if sampling.cuts else None,
        )
        for i in range(len(requests))
    ]


def _left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    return ids, mask
