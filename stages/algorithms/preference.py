"""Losses on preferences: pairs of responses, or single ones that are desirable or not.

A pair counts where both of its responses have a token, a single response where it has one. A loss
is a mean over those of the optimizer step. The reward that a policy implies for a response is
`beta` times its log-ratio to the reference, or times its average log-prob where the loss has no
reference; a log-prob is the sum over the response's tokens unless it is called average.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, MetricPart, Per, Tokens
from stages.contracts.objectives import REFERENCE_FREE, PreferenceLoss

ROUNDING = 1e-6
"""Of a response's log-prob: models compute in float32, so what is closer than that is a tie. At the
first step, where the policy is the reference, all are."""


@dataclass(frozen=True)
class PairLogprobs:
    """[P] each: a model's log-probs of the two responses of each pair."""

    chosen: Tensor
    """The sum of the log-probs of the response's valid tokens."""
    rejected: Tensor
    chosen_tokens: Tensor
    """The number of those tokens."""
    rejected_tokens: Tensor

    @classmethod
    def from_tokens(cls, logprobs: Tensor, tokens: Tokens) -> "PairLogprobs":
        """Of a batch whose sequences are the P chosen responses, then the P rejected ones."""
        sums, lengths = tokens.by_sequence(logprobs), tokens.lengths
        half = tokens.num_sequences // 2
        return cls(sums[:half], sums[half:], lengths[:half], lengths[half:])

    @property
    def valid(self) -> Tensor:
        """[P] True where the pair counts."""
        return (self.chosen_tokens > 0) & (self.rejected_tokens > 0)

    def counts(self) -> Counts:
        """Of these pairs alone: valid pairs, and the tokens of their chosen responses."""
        chosen_tokens = torch.where(self.valid, self.chosen_tokens, 0)
        return Counts(float(chosen_tokens.sum()), float(self.valid.sum()))


@dataclass(frozen=True)
class PreferenceObjective:
    """Which loss of a pair, and its constants."""

    kind: PreferenceLoss
    beta: float
    label_smoothing: float = 0.0
    """The probability that a label is wrong (sigmoid and robust)."""
    margin: float = 0.0
    """SimPO's target margin between rewards, gamma in the paper."""
    nll_coef: float = 0.0
    """Weight of the chosen responses' negative log-likelihood; for ORPO it is 1 by definition."""


def preference_loss(
    policy: PairLogprobs,
    reference: PairLogprobs | None,
    counts: Counts,
    objective: PreferenceObjective,
) -> Loss:
    """The loss of preference pairs; `counts` are valid pairs and their chosen responses' tokens."""
    kind, beta, valid = objective.kind, objective.beta, policy.valid

    def keep(values: Tensor) -> Tensor:
        return torch.where(valid, values, 0.0)

    chosen, rejected = keep(policy.chosen), keep(policy.rejected)
    chosen_tokens = policy.chosen_tokens.clamp(min=1).to(chosen.dtype)
    rejected_tokens = policy.rejected_tokens.clamp(min=1).to(rejected.dtype)
    if kind in REFERENCE_FREE:
        h_chosen, h_rejected = chosen / chosen_tokens, rejected / rejected_tokens
    elif reference is None:
        raise ValueError(f"the {kind} loss needs the log-probs of a reference")
    else:
        h_chosen = chosen - keep(reference.chosen)
        h_rejected = rejected - keep(reference.rejected)
    margin = h_chosen - h_rejected
    losses = _by_pair(objective, h_chosen, h_rejected, chosen_tokens, rejected_tokens)
    tie = 0.0 if kind in REFERENCE_FREE else ROUNDING * (chosen.abs() + rejected.abs())
    nll = -chosen.sum()
    nll_weight = 1.0 if kind is PreferenceLoss.ORPO else objective.nll_coef
    value = keep(losses).sum() / counts.sequences + nll_weight * nll / counts.tokens
    return Loss(
        value,
        {
            "preference_accuracy": MetricPart((margin > tie).to(value.dtype).sum(), Per.SEQUENCE),
            "reward_margin": MetricPart(beta * margin.sum(), Per.SEQUENCE),
            "chosen_reward": MetricPart(beta * h_chosen.sum(), Per.SEQUENCE),
            "rejected_reward": MetricPart(beta * h_rejected.sum(), Per.SEQUENCE),
            "chosen_logprob": MetricPart(chosen.sum(), Per.SEQUENCE),
            "rejected_logprob": MetricPart(rejected.sum(), Per.SEQUENCE),
            "chosen_nll": MetricPart(nll, Per.TOKEN),
        },
    )


def _by_pair(
    objective: PreferenceObjective,
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
) -> Tensor:
    """[P] the loss of each pair, from log-ratios to the reference or average log-probs, as in

    sigmoid: DPO (Rafailov et al. 2023), with label smoothing cDPO (Mitchell 2023);
    hinge: SLiC-HF (Zhao et al. 2023) of DPO's rewards;
    ipo: IPO (Azar et al. 2023, eq. 17) of log-ratios averaged over each response's tokens;
    robust: rDPO (Chowdhury et al. 2024), unbiased where labels are flipped at a known rate;
    apo_zero, apo_down: APO (D'Oosterlinck et al. 2024), with 1 - σ where the paper has -σ;
    simpo: SimPO (Meng et al. 2024);
    orpo: the odds-ratio term of ORPO (Hong et al. 2024, eq. 7), weighted by beta.
    """
    beta, smoothing = objective.beta, objective.label_smoothing
    logits = beta * (chosen - rejected)
    right, wrong = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    match objective.kind:
        case PreferenceLoss.SIGMOID:
            return (1 - smoothing) * right + smoothing * wrong
        case PreferenceLoss.HINGE:
            return torch.relu(1 - logits)
        case PreferenceLoss.IPO:
            average = chosen / chosen_tokens - rejected / rejected_tokens
            return (average - 1 / (2 * beta)).square()
        case PreferenceLoss.ROBUST:
            if not 0 <= smoothing < 0.5:
                raise ValueError(f"robust: label_smoothing must be in [0, 0.5), not {smoothing}")
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        case PreferenceLoss.APO_ZERO:
            return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)
        case PreferenceLoss.APO_DOWN:
            return torch.sigmoid(beta * chosen) + torch.sigmoid(-logits)
        case PreferenceLoss.SIMPO:
            return -F.logsigmoid(logits - objective.margin)
        case PreferenceLoss.ORPO:
            return -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    raise ValueError(f"{objective.kind} does not learn from pairs: use kto_loss")


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of a probability p, finite even where p was rounded to 1."""
    below_one = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def kto_baseline(total_log_ratio: float, num_sequences: float) -> float:
    """KTO's z0: the mean log-ratio of prompts with responses to other prompts, at least 0.

    Both numbers are of the whole optimizer step, summed over micro-batches and ranks.
    """
    return max(0.0, total_log_ratio / num_sequences)


@dataclass(frozen=True)
class KtoObjective:
    """KTO's constants: beta, and the weights lambda of the two kinds of responses."""

    beta: float
    desirable_weight: float
    undesirable_weight: float


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    num_tokens: Tensor,
    baseline: float,
    counts: Counts,
    objective: KtoObjective,
) -> Loss:
    """KTO (Ethayarajh et al. 2024): rewards above the baseline for what is desirable, [B].

    `baseline` is `kto_baseline` of the step, which bears no gradient. The mean is over all valid
    responses of the step, desirable or not; so are the metrics, whose reward shares become the mean
    reward of the desirable (or undesirable) responses when divided by their share of responses.
    """
    valid = num_tokens > 0
    log_ratios = torch.where(valid, logprobs, 0.0) - torch.where(valid, ref_logprobs, 0.0)
    above = torch.where(desirable, log_ratios - baseline, baseline - log_ratios)
    regret = torch.where(valid, torch.sigmoid(-objective.beta * above), 0.0)
    losses = torch.where(
        desirable, objective.desirable_weight * regret, objective.undesirable_weight * regret
    )

    def total(counted: Tensor, values: Tensor) -> MetricPart:
        return MetricPart(torch.where(valid & counted, values, 0.0).sum(), Per.SEQUENCE)

    rewards, ones = objective.beta * log_ratios, torch.ones_like(log_ratios)
    return Loss(
        losses.sum() / counts.sequences,
        {
            "label_accuracy": total(above > ROUNDING * logprobs.abs(), ones),
            "desirable_share": total(desirable, ones),
            "desirable_reward_share": total(desirable, rewards),
            "undesirable_reward_share": total(~desirable, rewards),
        },
    )
