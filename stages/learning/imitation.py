"""Imitation: SFT on demonstrations, or on a policy's own best responses."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.algorithms.loss import Loss, Tokens
from stages.algorithms.nll import nll_loss
from stages.context import StageError
from stages.data.batching import collate, whole_masks
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import pad_id
from stages.engines.training.loop import Rows, Step, Work, counted

TokenIds = Sequence[int]


def imitation(
    model: Any,
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds],
    device: str,
    describe: Callable[[int], str],
    loss_masks: Sequence[TokenIds | None] | None = None,
) -> Work:
    """The negative log-likelihood of completion tokens; prompt tokens are masked.

    So are the tokens of a completion whose loss mask has 0 for them.
    """
    masks = whole_masks(completions, loss_masks)
    num_tokens = [sum(mask) for mask in masks] if masks else list(map(len, completions))
    for row, num in enumerate(num_tokens):
        if not num:
            raise StageError(f"{describe(row)} has no token to learn from: leave it out")

    def loss(rows: Rows, step: Step) -> Loss:
        batch = collate(
            [prompts[i] for i in rows],
            [completions[i] for i in rows],
            pad_id(model),
            device,
            loss_masks=masks and [masks[i] for i in rows],
        )
        current = response_logprobs(model, batch, temperature=1.0)
        tokens = Tokens.padded(batch.loss_mask)
        return nll_loss(current.logprobs, current.entropies, tokens, step.counts)

    return Work(
        counted(num_tokens),
        loss,
        describe=describe,
        length=lambda i: len(prompts[i]) + len(completions[i]),
    )
