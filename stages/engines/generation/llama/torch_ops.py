"""The arithmetic of a decode step in plain torch, for the CPU and as the kernels' reference.

`kernels.py` has the same functions as Triton kernels.

Shapes: R slots that a step computes; H heads of which every G share one of K key/value heads; D
numbers a head. A layer's caches are [slots, K, length, D].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.engines.generation.llama.slots import LENGTH
from stages.engines.generation.llama.weights import Layer, Shape

Attend = Callable[[Tensor, Layer, Tensor, Tensor], Tensor]
"""(qkv [R, (H + 2K) * D], the layer, its caches) -> [R, H * D]; writes the caches."""

Enter = Callable[[Tensor, Layer, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(qkv [B, L, (H + 2K) * D] of B prompts, the layer, its caches) -> queries [B, H, L, D], keys and
values [B, K, L, D]; writes the caches."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 I] to [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; cosines and sines are [..., D], broadcast over the heads of x."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def split_heads(
    qkv: Tensor, layer: Layer, shape: Shape, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., heads, D] each: queries and keys normed, where the layer does so, and rotated."""
    num_heads, num_kv = shape.num_heads, shape.num_kv_heads
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv, shape.head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv, num_kv], dim=-2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, shape.norm_eps)
        k = rms_norm(k, layer.k_norm, shape.norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def attention(state: Tensor, shape: Shape, cos: Tensor, sin: Tensor) -> Attend:
    """Attention of each slot's next token over its own sequence, for slots of this state."""
    lengths = state[:, LENGTH]
    rows = torch.arange(len(state), device=state.device)
    cos, sin = cos[lengths, None], sin[lengths, None]
    span = int(lengths.max()) + 1
    seen = torch.arange(span, device=state.device) <= lengths[:, None]
    # Zeros and infinities rather than truths: that is what it would be made into in each layer.
    mask = torch.where(seen, 0.0, -torch.inf).to(cos.dtype)[:, None, None]
    group = shape.num_heads // shape.num_kv_heads

    def attend(qkv: Tensor, layer: Layer, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, layer, shape, cos, sin)
        keys[rows, :, lengths] = k
        values[rows, :, lengths] = v
        # The heads that share a key/value head are so many queries to it: nothing is repeated.
        mixed = F.scaled_dot_product_attention(
            q.reshape(len(rows), shape.num_kv_heads, group, shape.head_dim),
            keys[: len(rows), :, :span],
            values[: len(rows), :, :span],
            attn_mask=mask.expand(-1, -1, group, -1),
        )
        return mixed.flatten(1)

    return attend


def prompts(shape: Shape, cos: Tensor, sin: Tensor, slots: Tensor, prompt_of: Tensor) -> Enter:
    """Prompts, from their first token on, enter the caches of all slots that begin with them."""

    def enter(
        qkv: Tensor, layer: Layer, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = qkv.shape[1]
        q, k, v = (
            part.transpose(1, 2)
            for part in split_heads(qkv, layer, shape, cos[:length, None], sin[:length, None])
        )
        keys[:, :, :length].index_copy_(0, slots, k.index_select(0, prompt_of))
        values[:, :, :length].index_copy_(0, slots, v.index_select(0, prompt_of))
        return q, k, v

    return enter
