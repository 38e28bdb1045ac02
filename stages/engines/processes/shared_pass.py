"""A forward pass over all rows, group after group, of which each rank computes its share."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from stages.context import Context, Stopped
from stages.engines.processes.ranks import ALONE

R = TypeVar("R")
Group = Sequence[int]
"""Rows that go through the model together."""


def over_groups(
    ctx: Context,
    groups: Sequence[Group],
    compute: Callable[[Group], R],
    what: str,
    *,
    num_before: int = 0,
    num_after: int = 0,
) -> list[tuple[Group, R]]:
    """Each group with its result, on every rank; all ranks call it, and stop together.

    All make as many passes, the last ones for nothing: a model that is spread needs every rank.
    Progress counts rows, also those that came before these groups and that come after them.
    """
    ranks = ctx.ranks or ALONE
    share = ranks.share(groups)
    found: list[tuple[Group, R]] = []
    num_rows, num_done = sum(map(len, groups)), 0
    total = num_before + num_rows + num_after
    for turn in range(len(ranks.share(groups, of=0))):
        if any(ranks.agree(f"batch {turn + 1} of {what}", ctx.should_stop())):
            raise Stopped(f"stopped after {turn} batches of {what}")
        group = (share or groups)[min(turn, len(share) - 1)]
        result = compute(group)
        if turn < len(share):
            found.append((group, result))
        num_done += len(group) * ranks.world // ranks.num_sharing
        ctx.progress(num_before + min(num_done, num_rows), total, what)
    return list(chain.from_iterable(ranks.gather_shares(found)))
