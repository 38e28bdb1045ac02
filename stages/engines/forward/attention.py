"""Attention within each of several sequences that lie one after another in one row.

Transformers' models look their attention up by name; this one is called NAME. Without
`sequences` it is transformers' own SDPA, so a model under this name does all that it did before.
With them, every token attends to those before it in its own sequence and to nothing else:

- On a GPU in 16 bit by torch's variable-length FlashAttention, with as many key and value heads as
  the model has.
- Elsewhere by SDPA over sequences padded on the right, which no token before the padding attends
  to. Only the attention is padded; all other layers see the tokens alone.

What is no plain causal attention (a window, a cap on the scores, sinks) raises `NotPackable`.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from stages.engines.forward.ulysses import Group

NAME = "lockstep"
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")
"""What models hand to their attention that changes it."""


def causal_options(function: Any) -> dict[str, Any]:
    """How a version of torch is told that attention is causal, and that heads may be shared.

    The name of the first has changed; where the second has none, torch takes shared heads unasked.
    """
    taken = inspect.signature(function).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in taken else {})


_CAUSAL = causal_options(varlen_attn)


class NotPackable(Exception):
    """This attention needs more than the tokens before, of the same sequence."""


def register() -> None:
    """Make the name known to transformers, for attention and for the masks that go with it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a packed row are."""

    starts: Tensor
    """[S + 1] int32: where each sequence starts, and the last one ends."""
    span: Tensor
    """As long as the longest sequence, and empty: compiled code takes a shape as it comes, and is
    compiled anew for a number."""
    at: Tensor
    """Of each token in [S, longest], flattened."""
    group: Group | None = None
    """The ranks that share the row, if several do."""
    calls: list[int] | None = None
    """Gets the number of tokens that attend within their sequences, call after call."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, N, H, D] for query [1, H, N, D], key and value [1, G, N, D]; H is a multiple of G."""
    if sequences is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        answer, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return answer, None
    if sequences.group is not None:
        options["sequences"] = replace(sequences, group=None)
        answer, _ = sequences.group.attend(
            attend, module, query, key, value, attention_mask, **options
        )
        return answer, None
    wanted = [name for name in REFUSED if options.get(name) is not None]
    if wanted or not getattr(module, "is_causal", True):
        raise NotPackable(f"its attention is not plainly causal ({', '.join(wanted)})")
    if sequences.calls is not None:
        sequences.calls.append(query.shape[2])
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scaling, dropout = options.get("scaling"), options.get("dropout", 0.0)
    if _has_flash(q) and not dropout:
        return _by_flash(q, k, v, sequences, scaling)[None], None
    return _by_padding(q, k, v, sequences, scaling, dropout)[None], None


def _has_flash(q: Tensor) -> bool:
    narrow = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and narrow


def _by_flash(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scaling: float | None
) -> Tensor:
    starts, longest = sequences.starts, sequences.span.shape[0]
    answer = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, **_CAUSAL)
    assert isinstance(answer, Tensor)  # nothing else was asked for
    return answer


def _by_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    num_sequences, longest = len(sequences.starts) - 1, sequences.span.shape[0]
    at = sequences.at
    if q.is_cuda and q.shape[1] != k.shape[1]:
        # What shares heads without a copy is there what holds all scores of a sequence at once.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))

    def padded(part: Tensor) -> Tensor:
        spread = part.new_zeros(num_sequences * longest, *part.shape[1:]).index_copy(0, at, part)
        return spread.view(num_sequences, longest, *part.shape[1:]).transpose(1, 2)

    answer = F.scaled_dot_product_attention(
        padded(q),
        padded(k),
        padded(v),
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return answer.transpose(1, 2).reshape(num_sequences * longest, *q.shape[1:])[at]
