"""One row of tokens that several ranks share: DeepSpeed Ulysses, for sequences too long for one.

A *group* of neighbouring ranks takes the same rows. Each of its ranks puts its part of the tokens
through the model; in attention, which needs all tokens of a sequence, each has all of them but only
some of the heads. Always true:
- Whoever asks for hidden states gets those of all tokens, on every rank of the group. What comes
  after, the head and the loss, each of them computes whole.
- So a group's ranks have the same loss. Each counts it with one part in `size`, and the gradient
  that reaches a token's hidden state is the sum over the group: added up over all ranks, gradients
  are what they are without.
- A row is filled up at its end to a number of tokens that can be shared evenly, by a sequence that
  nobody asks for.

Only models whose rows are packed (packed.py) can be run so.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stages.context import Context, StageError
from stages.engines.models.lora import unwrapped
from stages.engines.processes.deepspeed_engine import connect
from stages.engines.processes.ranks import Ranks


class Group:
    """The ranks that share rows, as one of them sees it."""

    def __init__(self, group: Any, size: int) -> None:
        self.size = size
        self._group = group
        self._place = dist.get_rank(group)

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of a tensor over the tokens of a row, along its first dimension."""
        return tokens.chunk(self.size)[self._place]

    def whole(self, own: Tensor) -> Tensor:
        """All ranks' parts, one after another."""
        gathered: Tensor = _Whole.apply(own, self._group, self.size, self._place)  # type: ignore[no-untyped-call]
        return gathered

    def attend(self, inner: Callable[..., Any], module: Any, *parts: Any, **how: Any) -> Any:
        """`inner` with all tokens and some heads, for parts with some tokens and all heads."""
        query, key = parts[0], parts[1]
        exchange = _exchange(inner, self._group, query.shape[1], key.shape[1], query.shape[3])
        groups = getattr(module, "num_key_value_groups", None)
        answer = exchange(module, *parts, **how)
        if groups is not None:
            module.num_key_value_groups = groups  # where it copies key heads, it leaves its own
        return answer


_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def group_of(plain: Any) -> Group | None:
    """The group whose ranks share the rows of a model, if it is run so."""
    return _groups.get(plain)


def share_rows(ctx: Context, ranks: Ranks, model: Any) -> None:
    """From now on, until the ranks part, groups share each row of the model; all ranks call it."""
    if ctx.sequence_parallel == 1:
        return
    plain = unwrapped(model)
    config = plain.config.get_text_config()
    heads = config.num_attention_heads
    if heads % ctx.sequence_parallel:
        raise StageError(
            f"sequence_parallel {ctx.sequence_parallel} in the profile: the model's {heads} "
            "attention heads cannot be shared out evenly; choose a number that divides them"
        )
    keys = getattr(config, "num_key_value_heads", None) or heads
    if keys % ctx.sequence_parallel and ctx.sequence_parallel % keys:
        raise StageError(
            f"sequence_parallel {ctx.sequence_parallel} in the profile: the model's {keys} "
            "key/value heads can neither be shared out nor copied evenly; choose a number that "
            "divides them, or a multiple"
        )
    connect(ctx)
    if ranks.shared is None:
        ranks.shared = _make_groups(ranks.world, ctx.sequence_parallel)
    _groups[plain] = Group(ranks.shared, ctx.sequence_parallel)

    def part() -> None:
        del _groups[plain]

    ranks.at_end(part)


def _make_groups(world: int, size: int) -> Any:
    """This rank's group of neighbours; every rank has to make all of them."""
    mine = None
    for first in range(0, world, size):
        members = range(first, first + size)
        made = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = made
    return mine


@lru_cache(maxsize=8)
def _exchange(
    inner: Callable[..., Any], group: Any, heads: int, key_heads: int, head_size: int
) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF(
        attn=inner,
        batch_size=1,
        attn_head_count=heads,
        attn_head_size=head_size,
        kv_head_count=key_heads,
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, size: int, place: int) -> Tensor:
        ctx.group, ctx.size, ctx.place = group, size, place
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.size)[ctx.place], None, None, None
