"""Learning to say what is shown: SFT on demonstrations, or on a policy's own best responses."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.algorithms.loss import Loss, Tokens
from stages.algorithms.nll import nll_loss
from stages.data.batching import collate
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
) -> Work:
    """The negative log-likelihood of completion tokens; prompt tokens are masked."""

    def loss(rows: Rows, step: Step) -> Loss:
        batch = collate(
            [prompts[i] for i in rows], [completions[i] for i in rows], pad_id(model), device
        )
        said = response_logprobs(model, batch, temperature=1.0)
        tokens = Tokens.padded(batch.response_mask)
        return nll_loss(said.logprobs, said.entropies, tokens, step.counts)

    return Work(
        counted(list(map(len, completions))),
        loss,
        describe=describe,
        length=lambda i: len(prompts[i]) + len(completions[i]),
    )
