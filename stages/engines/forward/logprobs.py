"""Log-probs of response tokens, without the logits of a whole batch.

The backbone runs once (packed.py); the output head then sees only the positions that predict a
token to learn from, some at a time (head.py).

Shapes: as in stages.data.batching; V tokens in the vocabulary. Numbers at padding, and at tokens
that are not learnt from, are zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.context import StageError
from stages.data.batching import Batch, Support
from stages.engines.forward.head import Column, Read, chunk_tokens, logits_of, read_in_chunks
from stages.engines.forward.packed import backbone, hidden_states, settings_of, take
from stages.engines.models.lora import unwrapped

_compiled_read: Read | None = None
_checked: WeakSet[Any] = WeakSet()
"""Models whose logits were seen to be what is computed here."""


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
    """What `read(logits / temperature, *of_tokens)` gives for each learnt token, as [B, T, ...].

    `read` sees a chunk of n tokens: logits [n, V] in float32 at least, of each of `of_tokens`,
    [B, T, ...], the entries of these tokens, and their support, [n, K].
    """
    model = unwrapped(policy)
    if model not in _checked:
        _check_logits(model, batch.ids[:1, :1])
        _checked.add(model)
    packed, shape = batch.packed, batch.response_mask.shape
    hidden = take(hidden_states(policy, batch), packed.predicting)

    head = model.get_output_embeddings()
    compiled = settings_of(policy).compile and read is _of_token and support is None
    num_tokens = chunk_tokens(head, hidden.device, compiled)
    num_read = len(hidden)
    # A compiled chunk has one size.
    missing = -num_read % num_tokens if compiled else 0
    hidden = F.pad(hidden, (0, 0, 0, missing))
    columns: list[Column] = [
        torch.split(_lengthened(of.flatten(0, 1)[packed.responding], missing), num_tokens)
        for of in of_tokens
    ]
    if support is not None:
        columns.append(list(support.chunks(num_tokens, hidden.device)))

    reading = _read_compiled if compiled else _read
    read_scaled = partial(reading, read, model.config.get_text_config(), temperature)
    values = read_in_chunks(head, hidden, columns, read_scaled, num_tokens)
    return tuple(_spread(value[:num_read], packed.responding, shape) for value in values)


def _read(
    read: Read, config: Any, temperature: float, logits: Tensor, *parts: Tensor
) -> tuple[Tensor, ...]:
    return read(_after_head(config, logits) / temperature, *parts)


def _read_compiled(*args: Any) -> tuple[Tensor, ...]:
    global _compiled_read
    if _compiled_read is None:
        _compiled_read = torch.compile(_read, dynamic=False)
    return _compiled_read(*args)


def _lengthened(values: Tensor, missing: int) -> Tensor:
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


def _spread(values: Tensor, at: Tensor, shape: torch.Size) -> Tensor:
    """[B, T, ...] values where tokens count, zeros elsewhere."""
    spread = values.new_zeros(shape.numel(), *values.shape[1:]).index_copy(0, at, values)
    return spread.view(*shape, *values.shape[1:])


def _after_head(config: Any, logits: Tensor) -> Tensor:
    """What some families do to their logits."""
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def _check_logits(model: Any, ids: Tensor) -> None:
    """Refuse a model whose logits are not those that are computed here."""
    training = model.training
    model.eval()
    model_logits = model(input_ids=ids, use_cache=False).logits
    hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    config = model.config.get_text_config()
    ours = _after_head(config, logits_of(model.get_output_embeddings(), hidden))
    model.train(training)
    expected = model_logits.to(ours.dtype)
    # Weights that are not numbers are not this check's business.
    rounding = 1e-3 if model_logits.dtype == ours.dtype else 1e-2
    atol = rounding * float(expected.nan_to_num().abs().max())
    if not torch.allclose(ours, expected, rtol=0, atol=atol, equal_nan=True):
        raise StageError(
            f"a model of type {model.config.model_type} does something to its logits after the "
            "output head that is not known here: add it to stages/engines/forward/logprobs.py"
        )
