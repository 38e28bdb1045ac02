"""Supervised fine-tuning: the negative log-likelihood of a response's tokens.

The mean is over all tokens of the optimizer step, so that a token counts the same whatever the
lengths of its neighbours.
"""

from torch import Tensor

from stages.algorithms.loss import Counts, Loss, MetricPart, Per, Tokens


def nll_loss(logprobs: Tensor, entropies: Tensor, tokens: Tokens, counts: Counts) -> Loss:
    """-log p of each token that counts, averaged over the step's tokens."""
    return Loss(
        -tokens.total(logprobs) / counts.tokens,
        {"entropy": MetricPart(tokens.total(entropies), Per.TOKEN)},
    )
