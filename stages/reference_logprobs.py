"""reference_logprobs: what the policy that a preference run starts from says of the preferences.

It never changes while the run learns, so its log-probs are computed once and are an artifact of
their own: another beta, learning rate or number of epochs reads them again. Losses without a
reference get zeros, which nothing reads. Shards share out the rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import Context
from stages.contracts.objectives import REFERENCE_FREE, PreferenceLoss
from stages.contracts.precision import Precision
from stages.contracts.preference import ReferenceLogprobsConfig
from stages.data import schema
from stages.data.artifacts import read_role, write_parquet
from stages.data.finite import row_name
from stages.engines.forward.inference import response_pass
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import load_policy
from stages.engines.processes.parts import Pass, collect, fill
from stages.learning.unpaired import other_completions


def run(
    config: ReferenceLogprobsConfig,
    inputs: Mapping[str, Path],
    out: Mapping[str, Path],
    ctx: Context,
) -> dict[str, float | int]:
    if config.loss is PreferenceLoss.KTO:
        rows = read_role(inputs["feedback"], "feedback", f"preference.loss {config.loss}")
        responses = {
            "completion": [row["completion_ids"] for row in rows],
            "other": other_completions(rows),
        }
        columns = schema.FEEDBACK_LOGPROBS
    else:
        rows = read_role(inputs["preferences"], "preferences", f"preference.loss {config.loss}")
        responses = {side: [row[f"{side}_ids"] for row in rows] for side in ("chosen", "rejected")}
        columns = schema.PAIR_LOGPROBS
    if config.loss in REFERENCE_FREE:
        sums: dict[str, list[float]] = {side: [0.0] * len(rows) for side in responses}
    else:
        passes = {
            side: _pass(ctx, side, inputs["policy"], config.precision, rows, of)
            for side, of in responses.items()
        }
        fill(ctx, *passes.values())
        sums = {
            side: [sum(values) for values in collect(ctx, work)] for side, work in passes.items()
        }
    table = [
        {"prompt_id": row["prompt_id"], **dict(zip(sums, values, strict=True))}
        for row, values in zip(rows, zip(*sums.values(), strict=True), strict=True)
    ]
    write_parquet(out["logprobs"], table, columns)
    means = {f"{side}_logprob": sum(values) / len(values) for side, values in sums.items()}
    return {**means, "num_rows": len(rows)}


def _pass(
    ctx: Context,
    side: str,
    policy: Path,
    precision: Precision,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[Sequence[int]],
) -> Pass:
    asked = [
        {"prompt_ids": row["prompt_ids"], "response_ids": response, "name": row_name(side, i, row)}
        for i, (row, response) in enumerate(zip(rows, responses, strict=True))
    ]
    return response_pass(
        ctx,
        side,
        asked,
        lambda: load_policy(policy, ctx.device, precision),
        lambda model, batch: response_logprobs(model, batch, temperature=1.0).logprobs,
        "the reference's log-prob",
        lambda row: str(row["name"]),
    )
