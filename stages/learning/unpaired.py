"""Learning from single responses, each desirable or not: KTO.

The baseline that rewards are compared with is the policy's mean log-ratio on responses to *other*
prompts, over the whole optimizer step. Each row's other response is fixed beforehand: that of the
next row with another prompt.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.loss import Loss, MetricPart, Per, Tokens
from stages.algorithms.preference import KtoObjective, kto_baseline, kto_loss
from stages.context import StageError
from stages.data.batching import collate
from stages.data.finite import row_name
from stages.data.schema import FeedbackRow
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import pad_id
from stages.engines.training.loop import Rows, Step, Work, counted


class KtoRow(FeedbackRow):
    """Feedback, and the sums of the reference's log-probs."""

    desirable: bool
    ref: float
    """Of the completion."""
    other_ref: float
    """Of the other row's completion after this row's prompt."""


def other_completions(rows: Sequence[FeedbackRow] | Sequence[KtoRow]) -> list[list[int]]:
    """For each row, the completion of the next row (around the end) that has another prompt.

    It is cut where, after this row's prompt, it would be longer than any row is.
    """
    if len({row["prompt_id"] for row in rows}) < 2:
        raise StageError(
            "KTO compares with responses to other prompts, but the feedback has one prompt only: "
            "add feedback on others"
        )
    longest = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    # From the end, twice around: the next row, or where its prompt is the same, what is next to it.
    following: dict[int, int] = {}
    for index in reversed(range(2 * len(rows) - 1)):
        after = (index + 1) % len(rows)
        same = rows[after]["prompt_id"] == rows[index % len(rows)]["prompt_id"]
        if not same:
            following[index % len(rows)] = after
        elif after in following:
            following[index % len(rows)] = following[after]
    return [
        list(rows[following[index]]["completion_ids"])[: longest - len(row["prompt_ids"])]
        for index, row in enumerate(rows)
    ]


def kto(
    policy: Any,
    data: Sequence[KtoRow],
    others: Sequence[Sequence[int]],
    device: str,
    objective: KtoObjective,
) -> Work:
    """KTO's loss over the rows, with `others` to take the baseline from."""

    def logprobs_of(rows: Rows, responses: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """[B] log-probs of the responses, and their lengths."""
        prompts = [data[i]["prompt_ids"] for i in rows]
        batch = collate(prompts, responses, pad_id(policy), device)
        logprobs = response_logprobs(policy, batch, temperature=1.0).logprobs
        tokens = Tokens.padded(batch.response_mask)
        return tokens.by_sequence(logprobs), tokens.lengths

    def survey(rows: Rows) -> dict[str, float]:
        logprobs, _ = logprobs_of(rows, [others[i] for i in rows])
        reference = logprobs.new_tensor([data[i]["other_ref"] for i in rows])
        return {"log_ratio": float((logprobs - reference).sum())}

    def loss(rows: Rows, step: Step) -> Loss:
        logprobs, lengths = logprobs_of(rows, [data[i]["completion_ids"] for i in rows])
        baseline = kto_baseline(step.sums["log_ratio"], step.counts.sequences)
        learnt = kto_loss(
            logprobs,
            logprobs.new_tensor([data[i]["ref"] for i in rows]),
            torch.tensor([data[i]["desirable"] for i in rows], device=logprobs.device),
            lengths,
            baseline,
            step.counts,
            objective,
        )
        shown = MetricPart(logprobs.new_tensor(baseline), Per.MAX)
        return Loss(learnt.value.float(), {**learnt.metrics, "kto_baseline": shown})

    num_tokens = [len(row["completion_ids"]) for row in data]
    name_of = lambda i: row_name("feedback", i, data[i])  # noqa: E731

    def length(i: int) -> int:
        """Of the longer one, where the survey and the loss read two responses."""
        return len(data[i]["prompt_ids"]) + max(num_tokens[i], len(others[i]))

    return Work(counted(num_tokens), loss, survey, name_of, length)
