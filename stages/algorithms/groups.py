"""Groups of responses to one prompt: which of them can teach anything.

Group ids are any integers, in any order. A group whose rewards are all equal has no better and no
worse response, so its advantages are zero; so has a group of one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """[N] True for the rows of groups whose rewards [N] are all equal."""
    flat, index = _flat_groups(rewards, groups)
    return flat[index]


def share_of_zero_variance(rewards: Tensor, groups: Tensor) -> float:
    """The share of groups, not of rows, whose rewards are all equal."""
    flat, _ = _flat_groups(rewards, groups)
    return float(flat.double().mean()) if len(flat) else 0.0


def refill(order: Sequence[str], varied: set[str], wanted: int) -> list[str]:
    """Dynamic sampling (DAPO, Yu et al. 2025): the first `wanted` prompts whose groups vary.

    `order` is the order in which prompts were drawn. Fewer come back where more must be drawn.
    """
    return [prompt for prompt in dict.fromkeys(order) if prompt in varied][:wanted]


def _flat_groups(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """[G] whether each group's rewards are all equal, and [N] each row's place among the groups."""
    ids, index = torch.unique(groups, return_inverse=True)
    extremes = [
        rewards.new_zeros(len(ids)).scatter_reduce(0, index, rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    return extremes[0] == extremes[1], index
