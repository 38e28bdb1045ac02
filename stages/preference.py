"""preference: a policy that learns from preferences directly, without a reward model or rollouts.

The losses are in algorithms/preference.py. The reference is the policy that the run starts from;
its log-probs were computed beforehand, so one model is in memory. KTO learns from the feedback
(single responses with a rating), all others from the preference pairs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import Context, StageError
from stages.contracts.objectives import PreferenceLoss
from stages.contracts.preference import PreferenceConfig, PreferenceParams
from stages.data.artifacts import read_parquet, read_role
from stages.engines.models.folders import load_policy, save_model
from stages.engines.models.lora import open_for_training
from stages.engines.processes.ranks import join
from stages.engines.training.loop import Work, cosine_plan, fresh_learner, last_epoch_means, train
from stages.engines.training.rl_state import start_state
from stages.learning.pairs import preference
from stages.learning.unpaired import kto, other_completions

Row = dict[str, Any]


def run(
    config: PreferenceConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.preference
    unpaired = params.loss is PreferenceLoss.KTO
    role = "feedback" if unpaired else "preferences"
    rows = read_role(inputs[role], role, f"preference.loss {params.loss}")
    reference = _beside(rows, read_parquet(inputs["reference"]), inputs["reference"])
    plan = cosine_plan(params, len(rows), ctx.seed)
    with join(ctx) as ranks:
        policy = open_for_training(
            load_policy, inputs["policy"], ctx.loads_on, config.lora, ctx.seed
        )
        work = (_unpaired if unpaired else _paired)(policy, rows, reference, params, ctx.device)
        learner = fresh_learner(ctx, ranks, policy, params, config.precision)
        shown = ["loss", "label_accuracy" if unpaired else "preference_accuracy"]
        history = train(ctx, {"policy": learner}, plan, work, shown=shown, ranks=ranks)

    with learner.full_precision() as whole:
        save_model(whole, out["model"], tokenizer_from=inputs["policy"], lora=config.lora)
    start_state(out["state"])
    return {
        **last_epoch_means(history, plan),
        "num_rows": len(rows),
        "num_steps": plan.num_steps,
    }


def _paired(
    policy: Any,
    rows: Sequence[Row],
    reference: Sequence[Row],
    params: PreferenceParams,
    device: str,
) -> Work:
    pairs = [
        {**row, "chosen_ref": logprobs["chosen"], "rejected_ref": logprobs["rejected"]}
        for row, logprobs in zip(rows, reference, strict=True)
    ]
    return preference(
        policy,
        pairs,
        device,
        kind=params.loss,
        beta=params.beta,
        label_smoothing=params.label_smoothing,
        margin=params.margin,
        nll_coef=params.nll_coef,
    )


def _unpaired(
    policy: Any,
    rows: Sequence[Row],
    reference: Sequence[Row],
    params: PreferenceParams,
    device: str,
) -> Work:
    data = [
        {
            **row,
            "desirable": row["rating"] > params.desirable_above,
            "ref": logprobs["completion"],
            "other_ref": logprobs["other"],
        }
        for row, logprobs in zip(rows, reference, strict=True)
    ]
    num_desirable = sum(row["desirable"] for row in data)
    if num_desirable in (0, len(data)):
        raise StageError(
            f"{num_desirable} of {len(data)} responses in the feedback are desirable (rated above "
            f"preference.desirable_above {params.desirable_above}): KTO needs some of either kind"
        )
    return kto(
        policy,
        data,
        other_completions(rows),
        device,
        beta=params.beta,
        desirable_weight=params.desirable_weight,
        undesirable_weight=params.undesirable_weight,
    )


def _beside(rows: Sequence[Row], reference: Sequence[Row], path: Path) -> Sequence[Row]:
    """The reference's rows, if they are of these rows."""
    if [row["prompt_id"] for row in rows] != [row["prompt_id"] for row in reference]:
        raise StageError(
            f"{path} does not belong to these preferences: run reference_logprobs again"
        )
    return reference
