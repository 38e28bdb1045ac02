"""Attention within each of several sequences that lie one after another in one row.

Transformers' models look their attention up by name; this one is called NAME. Without word of
`starts` it is transformers' own SDPA, so a model under this name does all that it did before. With
them, every token attends to those before it in its own sequence and to nothing else:

- On a GPU in 16 bit by torch's variable-length FlashAttention, with as many key and value heads as
  the model has.
- Elsewhere by SDPA over sequences padded on the right, which no token before the padding attends
  to. Only the attention is padded; all other layers see the tokens alone.

What is no plain causal attention (a window, a cap on the scores, sinks) raises `NotPackable`.
"""

import inspect
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


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    starts: Tensor | None = None,
    span: Tensor | None = None,
    at: Tensor | None = None,
    together: Group | None = None,
    calls: list[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, N, H, D] for query [1, H, N, D], key and value [1, G, N, D]; H is a multiple of G.

    `span` is as long as the longest sequence. `calls` gets the number of tokens that attend within
    their sequences, call after call.
    """
    if together is not None:
        others |= {"scaling": scaling, "dropout": dropout}
        others |= {"starts": starts, "span": span, "at": at, "calls": calls}
        answer, _ = together.attend(attend, module, query, key, value, attention_mask, **others)
        return answer, None
    if starts is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        answer, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
        return answer, None
    wanted = [name for name in REFUSED if others.get(name) is not None]
    if wanted or not getattr(module, "is_causal", True):
        raise NotPackable(f"its attention is not plainly causal ({', '.join(wanted)})")
    if calls is not None:
        calls.append(query.shape[2])
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    assert span is not None
    longest = span.shape[0]
    if _has_flash(q) and not dropout:
        return _by_flash(q, k, v, starts, longest, scaling)[None], None
    assert at is not None
    return _by_padding(q, k, v, len(starts) - 1, longest, at, scaling, dropout)[None], None


def _has_flash(q: Tensor) -> bool:
    narrow = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and narrow


def _by_flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    answer = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, **_CAUSAL)
    assert isinstance(answer, Tensor)  # nothing else was asked for
    return answer


def _by_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_sequences: int,
    longest: int,
    at: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
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
