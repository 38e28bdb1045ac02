"""Learning from pairs of responses, the first preferred: DPO and its kin."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stages.algorithms.loss import Loss, MetricPart, Per, Tokens
from stages.algorithms.preference import PairLogprobs, PreferenceObjective, preference_loss
from stages.contracts.objectives import REFERENCE_FREE
from stages.data.batching import Batch
from stages.data.finite import row_name
from stages.data.segments import Row, batch_of, num_read
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import pad_id
from stages.engines.training.loop import Rows, Step, Work, counted

Pair = Mapping[str, Any]
"""prompt_ids, chosen_ids and rejected_ids; with a reference, the sums of its log-probs of the two
responses as chosen_ref and rejected_ref. Where there are any, chosen_mask and rejected_mask are the
responses' loss masks, and chosen_starts and chosen_histories, and those of the rejected one, their
segments (data/segments.py)."""
SIDES = ("chosen", "rejected")


def paired_batch(model: Any, pairs: Sequence[Pair], device: str) -> Batch:
    """The chosen responses, then the rejected ones, in one batch."""
    rows = [_row(pair, side) for side in SIDES for pair in pairs]
    return batch_of(rows, pad_id(model), device)


def pair_length(pair: Pair) -> int:
    """Tokens of a pair in a batch: its prompt is there twice."""
    return sum(num_read(_row(pair, side)) for side in SIDES)


def _row(pair: Pair, side: str) -> Row:
    parts = ("ids", "mask", "starts", "histories")
    names = ("response_ids", "loss_mask", "segment_starts", "segment_histories")
    values = [pair.get(f"{side}_{part}") for part in parts]
    return {"prompt_ids": pair["prompt_ids"], **dict(zip(names, values, strict=True))}


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
