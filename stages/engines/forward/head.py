"""The output head, some tokens at a time: logits of a whole batch never exist at once.

What is read off the logits of a chunk is a few values per token. In the backward pass the chunk's
logits are computed again instead of being kept. Logits are float32 whatever the model computes in,
and so are the sums of the head's gradient over the chunks: rounded to 16 bits they would differ
from the sampler's, which rounds in other places, by more than an update changes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512
"""Tokens whose logits, and what derives from them, are in memory together: in the backward pass at
a vocabulary of 150,000 about 2.5 gigabytes."""
CHUNK_LOGITS = 2**28
"""On a GPU, which is idle between small pieces of work, a chunk has as many tokens as have this
many logits: one gigabyte, of which the backward pass needs three or four."""

COMPILED_TOKENS = 4096
"""Tokens at most in each chunk where reading logits is compiled."""

Read = Callable[..., tuple[Tensor, ...]]
"""From the logits of a chunk, [n, V], and each column's part, to values per token, [n, ...]."""
Column = Sequence[Tensor]
"""A tensor over tokens, cut into chunks."""


def chunk_tokens(head: Any, device: torch.device, compiled: bool = False) -> int:
    if device.type != "cuda":
        return CHUNK_TOKENS
    vocabulary = int(head.weight.shape[0])
    tokens = max(1, CHUNK_LOGITS // (vocabulary * CHUNK_TOKENS)) * CHUNK_TOKENS
    # Smaller, as the last chunk is filled up to the size of all others.
    return min(tokens, COMPILED_TOKENS) if compiled else tokens


def read_in_chunks(
    head: Any, hidden: Tensor, columns: Sequence[Column], read: Read, num_tokens: int
) -> tuple[Tensor, ...]:
    """What `read` makes of the logits of hidden states [R, hidden], chunk by chunk, in a row."""
    if _is_plain(head):
        done: tuple[Tensor, ...] = _Chunks.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, columns, read, num_tokens
        )
        return done

    def of_chunk(hidden: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        return read(logits_of(head, hidden), *parts)

    chunks = [
        checkpoint(of_chunk, *parts, use_reentrant=False, preserve_rng_state=False)
        for parts in zip(torch.split(hidden, num_tokens), *columns, strict=True)
    ]
    return tuple(map(torch.cat, zip(*chunks, strict=True)))


def logits_of(head: Any, hidden: Tensor) -> Tensor:
    """In float32 at least."""
    if _is_plain(head):
        return _linear(hidden, head.weight, head.bias)
    logits: Tensor = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _is_plain(head: Any) -> bool:
    """Whether its weight is all there is to it, and all of it is here (zero3 empties weights)."""
    return type(head) is torch.nn.Linear and head.weight.numel() > 0


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    precision = torch.promote_types(weight.dtype, torch.float32)
    if weight.is_cuda and weight.dtype != precision and hidden.dim() == 2:
        logits = torch.mm(hidden, weight.t(), out_dtype=precision)
    else:
        logits = hidden.to(precision) @ weight.t().to(precision)
    return logits if bias is None else logits + bias


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        columns: Sequence[Column],
        read: Read,
        num_tokens: int,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.columns, ctx.read, ctx.num_tokens = columns, read, num_tokens
        ctx.set_materialize_grads(False)
        chunks = [
            read(_linear(of_hidden, weight, bias), *parts)
            for of_hidden, *parts in zip(torch.split(hidden, num_tokens), *columns, strict=True)
        ]
        done = tuple(map(torch.cat, zip(*chunks, strict=True)))
        ctx.mark_non_differentiable(*(part for part in done if not part.is_floating_point()))
        return done

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        precision = torch.promote_types(weight.dtype, torch.float32)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=precision) if weight.requires_grad else None
        of_bias = None
        if bias is not None and bias.requires_grad:
            of_bias = torch.zeros_like(bias, dtype=precision)
        nothing: list[None] = [None] * (len(hidden) // ctx.num_tokens + 1)
        pieces = [nothing if g is None else torch.split(g, ctx.num_tokens) for g in gradients]
        for number, (into, part, *rest) in enumerate(
            zip(
                torch.split(of_hidden, ctx.num_tokens),
                torch.split(hidden, ctx.num_tokens),
                *ctx.columns,
                strict=True,
            )
        ):
            wanted = [of_output[number] for of_output in pieces]
            of_logits = _of_logits(_linear(part, weight, bias), rest, ctx.read, wanted)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            low = of_logits.to(weight.dtype)
            torch.mm(low, weight, out=into)
            if of_weight is not None:
                _add_product(of_weight, low.t(), part)
        down = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_hidden, down, of_bias, None, None, None


def _of_logits(
    logits: Tensor, parts: Sequence[Tensor], read: Read, wanted: Sequence[Tensor | None]
) -> Tensor:
    """The gradient of a chunk's logits by those of what was read off them."""
    logits.requires_grad_()
    with torch.enable_grad():
        values = read(logits, *parts)
    pairs = [
        (value, gradient)
        for value, gradient in zip(values, wanted, strict=True)
        if gradient is not None and value.requires_grad
    ]
    if not pairs:
        return torch.zeros_like(logits)
    outputs, gradients = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(outputs, logits, gradients)
    return gradient


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum in `total`'s precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)
