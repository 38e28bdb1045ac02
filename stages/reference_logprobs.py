"""reference_logprobs: what the policy that a preference run starts from says of the preferences.

It never changes while the run learns, so its log-probs are computed once and are an artifact of
their own: another beta, learning rate or number of epochs reads them again. Losses without a
reference get zeros, which nothing reads. Shards share out the rows, or ranks that are joined, over
which the policy is spread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.context import Context
from stages.contracts.objectives import REFERENCE_FREE, PreferenceLoss
from stages.contracts.preference import ReferenceLogprobsConfig
from stages.data.artifacts import read_role, write_parquet
from stages.data.finite import row_name
from stages.data.schema import (
    FeedbackLogprobsRow,
    FeedbackRow,
    PairLogprobsRow,
    PreferenceRow,
    ResponseIds,
)
from stages.engines.forward.inference import Quantity, logprobs_by, response_pass
from stages.engines.models.loaders import fresh
from stages.engines.processes.parts import Pass, collect, fill
from stages.engines.processes.ranks import join
from stages.learning.unpaired import other_completions


def run(
    config: ReferenceLogprobsConfig,
    inputs: Mapping[str, Path],
    out: Mapping[str, Path],
    ctx: Context,
) -> dict[str, float | int]:
    reader = f"preference.loss {config.loss}"
    rows: Sequence[FeedbackRow] | Sequence[PreferenceRow]
    kind: type[FeedbackLogprobsRow] | type[PairLogprobsRow]
    responses: dict[str, Sequence[Sequence[int]]]
    if config.loss is PreferenceLoss.KTO:
        rows = read_role(inputs["feedback"], FeedbackRow, "feedback", reader)
        responses = {
            "completion": [row["completion_ids"] for row in rows],
            "other": other_completions(rows),
        }
        kind = FeedbackLogprobsRow
    else:
        rows = read_role(inputs["preferences"], PreferenceRow, "preferences", reader)
        responses = {
            "chosen": [row["chosen_ids"] for row in rows],
            "rejected": [row["rejected_ids"] for row in rows],
        }
        kind = PairLogprobsRow
    with join(ctx):
        if config.loss in REFERENCE_FREE:
            sums = {side: [0.0] * len(rows) for side in responses}
        else:
            sums = _sums(config, inputs["policy"], rows, responses, ctx)
    table = [
        {"prompt_id": row["prompt_id"], **dict(zip(sums, values, strict=True))}
        for row, values in zip(rows, zip(*sums.values(), strict=True), strict=True)
    ]
    write_parquet(out["logprobs"], table, kind)
    means = {f"{side}_logprob": sum(values) / len(values) for side, values in sums.items()}
    return {**means, "num_rows": len(rows)}


def _sums(
    config: ReferenceLogprobsConfig,
    policy: Path,
    rows: Sequence[FeedbackRow] | Sequence[PreferenceRow],
    responses: Mapping[str, Sequence[Sequence[int]]],
    ctx: Context,
) -> dict[str, list[float]]:
    """The log-prob of each response, by side."""
    load = lambda: fresh(ctx).policy(policy, ctx.device, config.precision)  # noqa: E731
    logprobs = logprobs_by("reference", load, temperature=1.0)
    passes = {side: _pass(ctx, side, logprobs, rows, of) for side, of in responses.items()}
    fill(ctx, *passes.values())
    return {side: [sum(values) for values in collect(ctx, work)] for side, work in passes.items()}


def _pass(
    ctx: Context,
    side: str,
    logprobs: Quantity,
    rows: Sequence[FeedbackRow] | Sequence[PreferenceRow],
    responses: Sequence[Sequence[int]],
) -> Pass:
    asked: list[ResponseIds] = [
        {
            "prompt_ids": row["prompt_ids"],
            "response_ids": response,
            "support": None,
            "loss_mask": None,
        }
        for row, response in zip(rows, responses, strict=True)
    ]
    return response_pass(ctx, side, asked, logprobs, lambda i: row_name(side, i, rows[i]))
