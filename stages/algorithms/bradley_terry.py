"""The reward model's loss, summed over pairs.

Bradley and Terry's model of a preference is applied not only to the rewards of whole responses but
to what the model says at every token from the first that differs on, as DeepSpeed-Chat does (Yao et
al. 2023). The token that makes a response worse is then seen as such, so far fewer pairs are
needed, and a critic that starts from the reward model knows something of partial responses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, mask: Tensor, *, centre: float) -> Tensor:
    """-log P(chosen beats rejected), averaged over the masked tokens of each pair, [B, T].

    Only differences of rewards matter to that; `centre` weighs a pull of each pair's sum towards
    zero, which fixes their level.
    """
    per_token = -F.logsigmoid(chosen - rejected) + centre * (chosen + rejected).square()
    return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).sum()


def tokens_that_differ(
    chosen_ids: Tensor, rejected_ids: Tensor, chosen_mask: Tensor, rejected_mask: Tensor
) -> Tensor:
    """[B, T] 1.0 from the first difference of two responses to the end of the longer one."""
    either = torch.maximum(chosen_mask, rejected_mask)
    both = torch.minimum(chosen_mask, rejected_mask)
    differs = ((chosen_ids != rejected_ids) | (both == 0)) & (either > 0)
    return (differs.cumsum(1) > 0).float() * either
