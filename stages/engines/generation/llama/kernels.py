"""The arithmetic of a decode step as Triton kernels, the same functions as in torch_ops.py.

Each kernel's sums have a fixed order, so results repeat. What torch rounds to the weights' type on
the way is rounded here, too; sums are float32. Shapes: as in torch_ops.py; row by row, a program
each, or one for each row and key/value head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.engines.generation.drawing import MASS
from stages.engines.generation.llama.prompt_kernels import prompts as prompts
from stages.engines.generation.llama.slots import (
    COUNT,
    LENGTH,
    LIMIT,
    NUM_FIELDS,
    REQUEST,
    TOKEN,
    Slots,
)
from stages.engines.generation.llama.torch_ops import Attend
from stages.engines.generation.llama.weights import Layer, Shape

BLOCK_TOKENS = 64
"""Cached tokens that attention reads at a time, of 16 bits a number; of 32, half as many."""
BLOCK_VOCABULARY = 2048
"""Logits that a draw reads at a time: so few that a GPU holds hundreds of draws at once."""
BLOCK_SWIGLU = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 8)
    _rms_norm[(x.numel() // width,)](x, weight, out, width, eps, block, num_warps=warps)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[R, 2 I] to [R, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK_SWIGLU))
    _swiglu[grid](gate_up, out, width, BLOCK_SWIGLU, num_warps=4)
    return out


def attention(state: Tensor, shape: Shape, cos: Tensor, sin: Tensor) -> Attend:
    """Attention of each slot's next token over its own sequence, for slots of this state."""
    num_kv, dim = shape.num_kv_heads, shape.head_dim
    group = shape.num_heads // num_kv

    def attend(qkv: Tensor, layer: Layer, keys: Tensor, values: Tensor) -> Tensor:
        out = qkv.new_empty(len(state), shape.num_heads * dim)
        _attention[(len(state), num_kv)](
            qkv,
            out,
            keys,
            values,
            state,
            cos,
            sin,
            layer.q_norm if layer.q_norm is not None else qkv,
            layer.k_norm if layer.k_norm is not None else qkv,
            keys.shape[2],
            dim**-0.5,
            shape.norm_eps,
            num_kv,
            group,
            dim,
            layer.q_norm is not None,
            max(16, triton.next_power_of_2(group)),
            max(16, triton.next_power_of_2(dim)),
            max(16, 2 * BLOCK_TOKENS // qkv.element_size()),
            "ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
        )
        return out

    return attend


def draw_and_record(logits: Tensor, board: Slots) -> None:
    """What `Slots.record` does, for sampling that cuts nothing off."""
    vocabulary = logits.shape[1]
    num_blocks = triton.cdiv(vocabulary, BLOCK_VOCABULARY)
    _draw[(len(logits),)](
        logits,
        board.state,
        board.uniforms,
        board.temperature,
        board.ends,
        board.tokens,
        board.logprobs,
        board.entropies,
        board.counts,
        vocabulary,
        board.tokens.shape[1],
        len(board.ends),
        max(2, triton.next_power_of_2(num_blocks)),
        BLOCK_VOCABULARY,
        num_warps=8,
    )


_LENGTH, _TOKEN, _COUNT = tl.constexpr(LENGTH), tl.constexpr(TOKEN), tl.constexpr(COUNT)
_REQUEST, _LIMIT, _FIELDS = tl.constexpr(REQUEST), tl.constexpr(LIMIT), tl.constexpr(NUM_FIELDS)
_MASS = tl.constexpr(MASS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attention(
    qkv, out, keys, values, state, cosines, sines, q_norm, k_norm, max_length, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(state + row * _FIELDS + _LENGTH).to(tl.int32)
    if tl.load(state + row * _FIELDS + _REQUEST) < 0:
        return
    dtype = keys.dtype.element_ty
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    is_dim = d < DIM
    is_q = (g < GROUP)[:, None] & is_dim[None, :]
    # Rotation mixes a number with the one half a head away.
    other = (d + DIM // 2) % DIM
    sign = tl.where(d < DIM // 2, -1.0, 1.0)
    cos = tl.load(cosines + length * DIM + d, mask=is_dim, other=0.0).to(tl.float32)
    sin = tl.load(sines + length * DIM + d, mask=is_dim, other=0.0).to(tl.float32) * sign

    of_row = qkv + row * (GROUP + 2) * KV_HEADS * DIM
    of_q = of_row + (head * GROUP + g)[:, None] * DIM
    of_k = of_row + (KV_HEADS * GROUP + head) * DIM
    of_v = of_k + KV_HEADS * DIM
    q = tl.load(of_q + d[None, :], mask=is_q, other=0.0).to(tl.float32)
    q_other = tl.load(of_q + other[None, :], mask=is_q, other=0.0).to(tl.float32)
    k = tl.load(of_k + d, mask=is_dim, other=0.0).to(tl.float32)
    k_other = tl.load(of_k + other, mask=is_dim, other=0.0).to(tl.float32)
    if NORM:
        q_gain = tl.load(q_norm + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        q_gain_other = tl.load(q_norm + other, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        k_gain = tl.load(k_norm + d, mask=is_dim, other=0.0).to(tl.float32)
        k_gain_other = tl.load(k_norm + other, mask=is_dim, other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(q * q, axis=1) / DIM + eps)[:, None]
        k_scale = tl.rsqrt(tl.sum(k * k, axis=0) / DIM + eps)
        q = (q * q_scale).to(dtype).to(tl.float32) * q_gain
        q_other = (q_other * q_scale).to(dtype).to(tl.float32) * q_gain_other
        k = (k * k_scale).to(dtype).to(tl.float32) * k_gain
        k_other = (k_other * k_scale).to(dtype).to(tl.float32) * k_gain_other
        q, q_other = q.to(dtype).to(tl.float32), q_other.to(dtype).to(tl.float32)
        k, k_other = k.to(dtype).to(tl.float32), k_other.to(dtype).to(tl.float32)
    q = (q * cos[None, :] + q_other * sin[None, :]).to(dtype)
    k = (k * cos + k_other * sin).to(dtype)
    v = tl.load(of_v + d, mask=is_dim, other=0.0)

    cache = (row * KV_HEADS + head) * max_length * DIM
    tl.store(keys + cache + length * DIM + d, k, mask=is_dim)
    tl.store(values + cache + length * DIM + d, v, mask=is_dim)

    # The token itself comes first, from registers: what was just stored is not read back.
    scale = scale * _LOG2_E
    largest = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full([BLOCK_G], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + v.to(tl.float32)[None, :]
    n = tl.arange(0, BLOCK_N)
    for start in range(0, length, BLOCK_N):
        seen = start + n < length
        inside = seen[:, None] & is_dim[None, :]
        at = cache + (start + n)[:, None] * DIM + d[None, :]
        old_k = tl.load(keys + at, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(old_k), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1))
        shrunk = tl.exp2(largest - larger)
        weight = tl.exp2(score - larger[:, None])
        total = total * shrunk + tl.sum(weight, axis=1)
        old_v = tl.load(values + at, mask=inside, other=0.0)
        mixed = mixed * shrunk[:, None]
        mixed += tl.dot(weight.to(dtype), old_v, input_precision=PRECISION)
        largest = larger
    of_out = out + (row * KV_HEADS + head) * GROUP * DIM + g[:, None] * DIM + d[None, :]
    tl.store(of_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_q)


@triton.jit
def _draw(
    logits, state, uniforms, temperature, ends, tokens, logprobs, entropies, counts,
    vocabulary, room, num_ends,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = state + row * _FIELDS
    request = tl.load(slot + _REQUEST)
    if request < 0:
        return
    count = tl.load(slot + _COUNT)
    uniform = tl.load(uniforms + request * room + count)
    heat = tl.load(temperature)
    at = tl.arange(0, BLOCK)
    of_row = logits + row * vocabulary

    # What can be put together at the end is kept lane by lane: each sum over a block is a wait.
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + at < vocabulary
        value = tl.load(of_row + start + at, mask=inside, other=-float("inf")) / heat
        where = tl.where(value > best, start + at, where)
        best = tl.maximum(best, value)
    largest = tl.max(best, axis=0)
    # Of equals, the first.
    likeliest = tl.min(tl.where(best == largest, where, vocabulary), axis=0)

    blocks = tl.arange(0, NUM_BLOCKS)
    masses = tl.zeros([NUM_BLOCKS], tl.int64)
    terms = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + at < vocabulary
        value = tl.load(of_row + start + at, mask=inside, other=-float("inf")) / heat - largest
        share = tl.exp(value)
        mass = tl.sum((share * _MASS).to(tl.int64), axis=0)
        masses = tl.where(blocks == start // BLOCK, mass, masses)
        terms += tl.where(share == 0, 0.0, share * value)
    weighted = tl.sum(terms, axis=0)

    total = tl.sum(masses, axis=0)
    below = (tl.maximum(uniform, 0.0) * total.to(tl.float64)).to(tl.int64)
    below = tl.minimum(below, total - 1)
    # Sums of masses are exact, so the block that holds the token is, too.
    passed = tl.cumsum(masses, axis=0) <= below
    block = tl.sum(passed.to(tl.int32), axis=0)
    below -= tl.sum(tl.where(passed, masses, 0), axis=0)
    start = block * BLOCK
    inside = start + at < vocabulary
    value = tl.load(of_row + start + at, mask=inside, other=-float("inf")) / heat - largest
    within = tl.cumsum((tl.exp(value) * _MASS).to(tl.int64), axis=0)
    drawn = start + tl.sum((within <= below).to(tl.int32), axis=0)
    # Logits that are not numbers lead anywhere; their log-prob and entropy will show it.
    token = tl.minimum(tl.where(uniform < 0, likeliest, drawn), vocabulary - 1)

    sum_of_shares = (total.to(tl.float64) / _MASS).to(tl.float32)
    log_of_sum = tl.log(sum_of_shares)
    of_token = tl.load(of_row + token) / heat - largest
    tl.store(tokens + request * room + count, token.to(tl.int32))
    tl.store(logprobs + request * room + count, of_token - log_of_sum)
    entropy = log_of_sum - weighted / sum_of_shares
    tl.store(entropies + request, tl.load(entropies + request) + entropy)
    tl.store(counts + request, (count + 1).to(tl.int32))
    ended = count + 1 >= tl.load(slot + _LIMIT)
    for i in range(num_ends):
        ended = ended | (tl.load(ends + i) == token)
    tl.store(slot + _TOKEN, token.to(tl.int64))
    tl.store(slot + _LENGTH, tl.load(slot + _LENGTH) + 1)
    tl.store(slot + _COUNT, count + 1)
    tl.store(slot + _REQUEST, tl.where(ended, -1 - request, request))
