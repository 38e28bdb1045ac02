"""On-policy distillation: the student samples, and the teacher judges each token of it.

What is minimised is the reverse KL(student || teacher) at the student's own tokens (Agarwal et al.
2023; Gu et al. 2023), either by policy gradient from the sampled token alone or exactly over the
tokens that matter most.
"""

import torch
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, LossAggregation, MetricPart, Per, Tokens


def sampled_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Minus each sampled token's share of the reverse KL, for a policy-gradient loss."""
    return (teacher_logprobs - logprobs).detach()


def topk_reverse_kl(
    student: Tensor, teacher: Tensor, tokens: Tokens, counts: Counts, aggregation: LossAggregation
) -> Loss:
    """KL(student || teacher) over K token ids and one bucket for all others.

    Both are log-probs of the same K distinct ids at each position, [..., K] with the leading shape
    of `tokens`. Merging tokens into a bucket can only lower the divergence, and it is exact where
    the bucket is empty.
    """
    counted = tokens.mask[..., None]
    student, teacher = torch.where(counted, student, 0.0), torch.where(counted, teacher, 0.0)
    student = torch.cat([student, _rest(student)], dim=-1)
    teacher = torch.cat([teacher, _rest(teacher)], dim=-1)
    divergence = (student.exp() * (student - teacher)).sum(-1)
    return Loss(
        aggregation.share(divergence, tokens, counts),
        {"distillation_kl": MetricPart(tokens.total(divergence), Per.TOKEN)},
    )


def _rest(logprobs: Tensor) -> Tensor:
    """[..., 1] the log-prob of all other tokens, at least what rounding leaves of 1."""
    eps = torch.finfo(logprobs.dtype).eps
    listed = torch.logsumexp(logprobs, dim=-1, keepdim=True).clamp(max=-eps)
    return torch.log(-torch.expm1(listed))
