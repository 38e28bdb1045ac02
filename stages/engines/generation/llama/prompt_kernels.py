"""Prompts enter the cache by two Triton kernels per layer, whatever their number.

One norms and rotates queries and keys, a program for each token; the other copies keys and values
to every slot that begins with the prompt. The numbers are rounded as in a decode step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.engines.generation.llama.torch_ops import Enter
from stages.engines.generation.llama.weights import Layer, Shape

BLOCK_TOKENS = 16


def prompts(shape: Shape, cos: Tensor, sin: Tensor, slots: Tensor, prompt_of: Tensor) -> Enter:
    """As in torch_ops.py."""
    heads, num_kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_all = heads + 2 * num_kv
    block_dim = triton.next_power_of_2(dim)

    def enter(
        qkv: Tensor, layer: Layer, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_prompts, length = qkv.shape[:2]
        turned = torch.empty_like(qkv)
        _rotate[(num_prompts * length,)](
            qkv,
            turned,
            cos,
            sin,
            layer.q_norm if layer.q_norm is not None else qkv,
            layer.k_norm if layer.k_norm is not None else qkv,
            length,
            shape.norm_eps,
            heads,
            num_kv,
            dim,
            layer.q_norm is not None,
            triton.next_power_of_2(num_all),
            block_dim,
            num_warps=4,
        )
        _spread[(len(slots), num_kv, triton.cdiv(length, BLOCK_TOKENS))](
            turned,
            keys,
            values,
            slots,
            prompt_of,
            length,
            keys.shape[2],
            heads,
            num_kv,
            dim,
            BLOCK_TOKENS,
            block_dim,
            num_warps=1,
        )
        by_head = turned.view(num_prompts, length, num_all, dim).transpose(1, 2)
        q, k, v = torch.split(by_head, [heads, num_kv, num_kv], dim=1)
        return q, k, v

    return enter


@triton.jit(do_not_specialize=["length"])
def _rotate(
    qkv, out, cosines, sines, q_norm, k_norm, length, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = token % length
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_dim = d < DIM
    inside = (h < HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    # Rotation mixes a number with the one half a head away.
    other = (d + DIM // 2) % DIM
    sign = tl.where(d < DIM // 2, -1.0, 1.0)
    cos = tl.load(cosines + position * DIM + d, mask=is_dim, other=0.0).to(tl.float32)
    sin = tl.load(sines + position * DIM + d, mask=is_dim, other=0.0).to(tl.float32) * sign
    at = token * (HEADS + 2 * KV_HEADS) * DIM + h[:, None] * DIM
    given = tl.load(qkv + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    x = given
    x_other = tl.load(qkv + at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if NORM:
        is_q = (h < HEADS)[:, None]
        q_gain = tl.load(q_norm + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        k_gain = tl.load(k_norm + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        q_gain_other = tl.load(q_norm + other, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        k_gain_other = tl.load(k_norm + other, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = (x * scale).to(dtype).to(tl.float32) * tl.where(is_q, q_gain, k_gain)
        x_other = (x_other * scale).to(dtype).to(tl.float32)
        x_other = x_other * tl.where(is_q, q_gain_other, k_gain_other)
        x, x_other = x.to(dtype).to(tl.float32), x_other.to(dtype).to(tl.float32)
    turned = x * cos[None, :] + x_other * sin[None, :]
    is_value = (h >= HEADS + KV_HEADS)[:, None]
    tl.store(out + at + d[None, :], tl.where(is_value, given, turned).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _spread(
    turned, keys, values, slots, prompt_of, length, max_length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    slot, prompt = tl.load(slots + place), tl.load(prompt_of + place)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n < length)[:, None] & (d < DIM)[None, :]
    token = (prompt * length + n)[:, None]
    of_k = turned + (token * (HEADS + 2 * KV_HEADS) + HEADS + head) * DIM + d[None, :]
    k = tl.load(of_k, mask=inside, other=0.0)
    v = tl.load(of_k + KV_HEADS * DIM, mask=inside, other=0.0)
    to = ((slot * KV_HEADS + head) * max_length + n)[:, None] * DIM + d[None, :]
    tl.store(keys + to, k, mask=inside)
    tl.store(values + to, v, mask=inside)
