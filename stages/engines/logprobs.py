"""Log-probs of response tokens, without the logits of a whole batch.

The backbone runs once; the output head then sees only the positions that predict a response token,
CHUNK_TOKENS at a time, forward and backward, so tokens x vocabulary never exist at once.

Shapes: as in stages.data.batching; V tokens in the vocabulary. Numbers at padding are zeros.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.context import StageError
from stages.data.batching import Batch, Support
from stages.engines.lora import unwrapped

CHUNK_TOKENS = 512
"""Tokens whose logits, and what derives from them, are in memory together: in the backward pass at
a vocabulary of 150,000 about 2.5 gigabytes."""

_checked: WeakSet[Any] = WeakSet()
"""Models whose logits were seen to be what `_logits` computes."""


@dataclass(frozen=True)
class ResponseLogprobs:
    """[B, T] log-probs of the response's tokens, and entropies of what they were drawn from."""

    logprobs: Tensor
    entropies: Tensor


def response_logprobs(policy: Any, batch: Batch, temperature: float) -> ResponseLogprobs:
    """Under the distribution that the sampler draws from, both with a gradient.

    That is the temperature-scaled one; where the batch has a support, renormalised over it.
    """
    logprobs, entropies = _in_chunks(
        policy, batch, temperature, _of_token, batch.response_ids, support=batch.support
    )
    return ResponseLogprobs(logprobs, entropies)


@torch.no_grad()
def response_topk(policy: Any, batch: Batch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """[B, T, k] the ids of the likeliest tokens at each position, and their log-probs.

    Of the whole distribution, whatever the sampler cut off; the likeliest first.
    """

    def read(logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, ids = torch.log_softmax(logits, dim=-1).topk(k, dim=-1)
        return ids, logprobs

    ids, logprobs = _in_chunks(policy, batch, temperature, read)
    return ids, logprobs


def logprobs_of(policy: Any, batch: Batch, ids: Tensor, temperature: float) -> Tensor:
    """[B, T, k] the log-probs of given tokens at each position, with a gradient.

    Of the whole distribution, as in `response_topk`.
    """

    def read(logits: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (torch.log_softmax(logits, dim=-1).gather(-1, ids),)

    (logprobs,) = _in_chunks(policy, batch, temperature, read, ids)
    return logprobs


def _of_token(
    logits: Tensor, token: Tensor, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if support is not None:
        return _of_support(logits, token, support)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, token[:, None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def _of_support(logits: Tensor, token: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    cut = support < 0
    kept = logits.gather(-1, support.clamp(min=0)).masked_fill(cut, -torch.inf)
    # Zeros at the padding: exp(0) * 0 adds nothing, and no infinity meets a gradient.
    logprobs = torch.log_softmax(kept, dim=-1).masked_fill(cut, 0.0)
    chosen = (logprobs * (support == token[:, None])).sum(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def _in_chunks(
    policy: Any,
    batch: Batch,
    temperature: float,
    read: Callable[..., tuple[Tensor, ...]],
    *of_tokens: Tensor,
    support: Support | None = None,
) -> tuple[Tensor, ...]:
    """What `read(logits / temperature, *of_tokens)` gives for each response token, as [B, T, ...].

    `read` sees a chunk of n tokens: logits [n, V] in float32 at least, of each of `of_tokens`,
    [B, T, ...], the entries of these tokens, and their support, [n, K].
    """
    model = unwrapped(policy)
    if model not in _checked:
        _check_logits(model, batch.ids[:1, :1])
        _checked.add(model)
    counted = batch.response_mask > 0
    rows, steps = counted.nonzero(as_tuple=True)
    hidden = model.base_model(
        input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state[rows, batch.before[rows, steps]]

    def of_chunk(hidden: Tensor, *of_tokens: Tensor) -> tuple[Tensor, ...]:
        logits = _logits(model, hidden)
        precision = torch.promote_types(logits.dtype, torch.float32)
        return read(logits.to(precision) / temperature, *of_tokens)

    columns: list[Iterable[Tensor]] = [
        part.split(CHUNK_TOKENS) for part in (hidden, *(of[counted] for of in of_tokens))
    ]
    if support is not None:
        columns.append(support.chunks(CHUNK_TOKENS))
    # What a chunk computed is computed again in the backward pass instead of being kept.
    chunks = [
        checkpoint(of_chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        for parts in zip(*columns, strict=True)
    ]
    return tuple(_scatter(counted, torch.cat(values)) for values in zip(*chunks, strict=True))


def _scatter(counted: Tensor, values: Tensor) -> Tensor:
    """[B, T, ...] values where tokens count, zeros elsewhere."""
    return values.new_zeros(*counted.shape, *values.shape[1:]).index_put((counted,), values)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's logits for hidden states: its output head, and what some families do after."""
    config = model.config.get_text_config()
    logits: Tensor = model.get_output_embeddings()(hidden)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def _check_logits(model: Any, ids: Tensor) -> None:
    """Refuse a model whose logits `_logits` does not know how to compute."""
    training = model.training
    model.eval()
    expected = model(input_ids=ids, use_cache=False).logits
    ours = _logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    model.train(training)
    # Weights that are not numbers are not this check's business.
    atol = 1e-3 * float(expected.nan_to_num().abs().max())
    if not torch.allclose(ours, expected, rtol=0, atol=atol, equal_nan=True):
        raise StageError(
            f"a model of type {model.config.model_type} does something to its logits after the "
            "output head that is not known here: add it to stages/engines/logprobs.py"
        )
