"""The old log-probs of a policy gradient: log π_old of each sampled token, in the ratio π / π_old.

π_old is the policy that sampled, as the trainer evaluates it before the first optimizer step. An
update of several steps evaluates it once, by a forward pass over all rollouts
(`experience.measure`). An update of one step saves that pass: the policy of its own forward pass is
still π_old, so the old log-probs are the current ones without their gradient. They are compared
with the sampler's and the reference's after the step then, before anything is saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.contracts.objectives import KlPlace, Mismatch
from stages.contracts.rl import Algorithm
from stages.data.segments import is_segmented
from stages.learning.update import Update


def takes_one_step(update: Update, kl_coef: float) -> bool:
    """Whether the update has one step, and nothing needs the old log-probs before it.

    What would: a critic, a penalty in the reward, weights that correct for the sampler, rows that
    are left out, rows in several segments, other ranks that hold some of the rows.
    """
    params = update.config.policy_update
    return (
        update.ranks.world == 1
        and update.config.algorithm is not Algorithm.PPO
        and update.plan(len(update.rollouts)).num_steps == 1
        and not any(map(is_segmented, update.rollouts))
        and params.mismatch is Mismatch.NONE
        and not params.overlong_filter
        and (params.kl_in is KlPlace.LOSS or not kl_coef)
    )


@dataclass(frozen=True)
class OnlyStep:
    """The old log-probs of an update of one step, left here by its forward passes."""

    parts: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Rows and their log-probs, [rows, T], micro-batch after micro-batch."""

    def logprobs(self, shape: torch.Size) -> Tensor:
        """[N, T] those of all rows, zero in the padding."""
        logprobs = self.parts[0][1].new_zeros(shape)
        for rows, values in self.parts:
            logprobs[rows, : values.shape[1]] = values
        return logprobs


def old_logprobs(
    current: Tensor, measured: Tensor, rows: Sequence[int], only_step: OnlyStep | None
) -> Tensor:
    """[B, T] log π_old of the rows' tokens: `measured` before the first step.

    In an update of one step those of its own forward pass, `current`, which `only_step` keeps.
    """
    if only_step is None:
        return measured
    old = current.detach()
    only_step.parts.append((rows, old))
    return old
