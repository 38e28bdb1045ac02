"""Learning from pairs of responses, the first preferred: DPO and its kin."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stages.algorithms.loss import Loss, MetricPart, Per, Tokens
from stages.algorithms.preference import PairLogprobs, PreferenceObjective, preference_loss
from stages.contracts.objectives import REFERENCE_FREE
from stages.data.batching import Batch, collate
from stages.data.finite import row_name
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import pad_id
from stages.engines.training.loop import Rows, Step, Work, counted

Pair = Mapping[str, Any]
"""prompt_ids, chosen_ids and rejected_ids; with a reference, the sums of its log-probs of the two
responses as chosen_ref and rejected_ref. chosen_mask and rejected_mask, where there are any, are
the responses' loss masks."""


def paired_batch(model: Any, pairs: Sequence[Pair], device: str) -> Batch:
    """The chosen responses, then the rejected ones, in one batch."""
    prompts = [pair["prompt_ids"] for pair in pairs]
    responses = [pair[side] for side in ("chosen_ids", "rejected_ids") for pair in pairs]
    masks = [pair.get(side) for side in ("chosen_mask", "rejected_mask") for pair in pairs]
    return collate(prompts + prompts, responses, pad_id(model), device, loss_masks=masks)


def pair_length(pair: Pair) -> int:
    """Tokens of a pair in a batch: its prompt is there twice."""
    return 2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"])


def _chosen_tokens(pair: Pair) -> int:
    """Of a pair that counts: one that has tokens on both sides."""
    chosen, rejected = (
        len(pair[f"{side}_ids"]) if (mask := pair.get(f"{side}_mask")) is None else sum(mask)
        for side in ("chosen", "rejected")
    )
    return chosen if rejected else 0


def preference(
    policy: Any,
    pairs: Sequence[Pair],
    device: str,
    objective: PreferenceObjective,
    *,
    temperature: float = 1.0,
    describe: Callable[[int], str] | None = None,
) -> Work:
    """`describe` names a pair, else its place."""

    def loss(rows: Rows, step: Step) -> Loss:
        some = [pairs[i] for i in rows]
        batch = paired_batch(policy, some, device)
        now = response_logprobs(policy, batch, temperature)
        logprobs = now.logprobs
        pair_logprobs = PairLogprobs.from_tokens(logprobs, Tokens.padded(batch.loss_mask))
        reference = None
        if objective.kind not in REFERENCE_FREE:
            chosen, rejected = (
                torch.tensor([pair[side] for pair in some], device=device, dtype=torch.float64)
                for side in ("chosen_ref", "rejected_ref")
            )
            reference = PairLogprobs(
                chosen, rejected, pair_logprobs.chosen_tokens, pair_logprobs.rejected_tokens
            )
        learnt = preference_loss(pair_logprobs, reference, step.counts, objective)
        of_chosen = MetricPart(now.entropies.detach()[: len(some)].sum(), Per.TOKEN)
        return Loss(learnt.value.to(logprobs.dtype), {**learnt.metrics, "entropy": of_chosen})

    return Work(
        counted([_chosen_tokens(pair) for pair in pairs]),
        loss,
        describe=describe or (lambda i: row_name("preference", i, pairs[i])),
        length=lambda i: pair_length(pairs[i]),
    )
