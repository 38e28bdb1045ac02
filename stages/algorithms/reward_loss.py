"""Losses of a reward model: preference pairs, ratings, or steps that are right or wrong.

Bradley and Terry's model of a preference is applied not only to the rewards of whole responses but
to what the model says at every token from the first that differs on, as DeepSpeed-Chat does (Yao et
al. 2023). The token that makes a response worse is then seen as such, so far fewer pairs are
needed, and a critic that starts from the reward model knows something of partial responses.
`last_token_only` turns that into the comparison of whole responses (Ouyang et al. 2022).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, MetricPart, Per, Tokens
from stages.contracts.objectives import StepReward


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    mask: Tensor,
    counts: Counts,
    *,
    centre: float,
    margins: Tensor | None = None,
) -> Loss:
    """-log P(chosen beats rejected), averaged over the masked tokens of each pair, [P, T].

    A pair counts where its mask has a token. Only differences of rewards matter to the preference;
    `centre` weighs a pull of each pair's sum towards zero, which fixes their level. `margins`, [P],
    are by how much the chosen reward should exceed the other (Touvron et al. 2023). The metrics are
    of the last token that is compared, where both responses have ended.
    """
    tokens = Tokens.padded(mask)
    chosen, rejected = tokens.keep(chosen), tokens.keep(rejected)
    difference = chosen - rejected
    beyond = difference if margins is None else difference - margins[:, None]
    per_token = -F.logsigmoid(beyond) + centre * (chosen + rejected).square()
    at_end = (difference * last_token_only(mask)).sum(1)
    return Loss(
        tokens.mean_by_sequence(per_token).sum() / counts.sequences,
        {
            "preference_accuracy": MetricPart((at_end > 0).to(chosen.dtype).sum(), Per.SEQUENCE),
            "reward_margin": MetricPart(at_end.sum(), Per.SEQUENCE),
        },
    )


def tokens_that_differ(
    chosen_ids: Tensor, rejected_ids: Tensor, chosen_mask: Tensor, rejected_mask: Tensor
) -> Tensor:
    """[P, T] 1.0 from the first difference of two responses to the end of the longer one."""
    either = torch.maximum(chosen_mask, rejected_mask)
    both = torch.minimum(chosen_mask, rejected_mask)
    differs = ((chosen_ids != rejected_ids) | (both == 0)) & (either > 0)
    return (differs.cumsum(1) > 0).float() * either


def last_token_only(mask: Tensor) -> Tensor:
    """[P, T] 1.0 at the last token of each row's mask, if it has one."""
    counted = mask > 0
    num_from_here = counted.flip(1).cumsum(1).flip(1)
    return (counted & (num_from_here == 1)).float()


def regression_loss(scores: Tensor, ratings: Tensor, counts: Counts) -> Loss:
    """The mean squared error of scores for rated responses, [B]."""
    errors = scores - ratings
    return Loss(
        errors.square().sum() / counts.sequences,
        {"mean_absolute_error": MetricPart(errors.abs().sum(), Per.SEQUENCE)},
    )


def process_loss(scores: Tensor, labels: Tensor, tokens: Tokens, counts: Counts) -> Loss:
    """Whether each step is right, told at its last token (Lightman et al. 2023).

    The tokens that count are the ends of steps, and the mean is over the steps of the optimizer
    step. A label is 1 for a right step and 0 for a wrong one, or the probability that it is right.
    """
    logits, targets = tokens.keep(scores), tokens.keep(labels.to(scores.dtype))
    per_step = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    agrees = ((logits > 0) == (targets > 0.5)).to(scores.dtype)
    return Loss(
        tokens.total(per_step) / counts.tokens,
        {"step_accuracy": MetricPart(tokens.total(agrees), Per.TOKEN)},
    )


def step_reward(scores: Tensor, tokens: Tokens, how: StepReward) -> Tensor:
    """[S] the reward of each response from the probabilities that its steps are right.

    The tokens that count are the ends of steps; a response with none gets 0.
    """
    rewards = scores.new_zeros(tokens.num_sequences)
    if how is StepReward.LAST:
        position = torch.arange(scores.numel(), device=scores.device).view_as(scores)
        last = torch.zeros_like(rewards, dtype=torch.long).scatter_reduce(
            0, tokens.sequence[tokens.mask], position[tokens.mask], "amax"
        )
        return torch.where(tokens.lengths > 0, torch.sigmoid(scores.reshape(-1)[last]), 0.0)
    # On the CPU: torch has no product on a GPU whose order repeats, and these are few numbers.
    return (
        rewards.cpu()
        .scatter_reduce(
            0,
            tokens.sequence[tokens.mask].cpu(),
            torch.sigmoid(scores[tokens.mask]).cpu(),
            "amin" if how is StepReward.MIN else "prod",
            include_self=False,
        )
        .to(scores.device)
    )
