"""preference: a policy that learns from preferences directly, without a reward model or rollouts.

The losses are in algorithms/preference.py. The reference is the policy that the run starts from;
its log-probs were computed beforehand, so one model is in memory. KTO learns from the feedback
(single responses with a rating), all others from the preference pairs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.algorithms.preference import KtoObjective, PreferenceObjective
from stages.context import Context, StageError
from stages.contracts.objectives import PreferenceLoss
from stages.contracts.preference import PreferenceConfig, PreferenceParams
from stages.data.artifacts import read_parquet, read_role
from stages.data.schema import FeedbackLogprobsRow, FeedbackRow, PairLogprobsRow, PreferenceRow
from stages.engines.models.folders import load_policy
from stages.engines.models.lora import open_for_training
from stages.engines.models.unread import to_learn
from stages.engines.processes.ranks import join
from stages.engines.training.loop import cosine_plan, fresh_learner, last_epoch_means, train
from stages.engines.training.rl_state import start_state
from stages.engines.training.saving import save_learner
from stages.learning.pairs import Pair, preference
from stages.learning.unpaired import KtoRow, kto, other_completions


def run(
    config: PreferenceConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.preference
    unpaired = params.loss is PreferenceLoss.KTO
    rated = _rated(inputs, params) if unpaired else []
    pairs = [] if unpaired else _pairs(inputs, params)
    num_rows = len(rated) + len(pairs)
    plan = cosine_plan(params, num_rows, ctx.seed)
    with join(ctx) as ranks:
        policy = open_for_training(
            to_learn(load_policy, ctx), inputs["policy"], ctx.loads_on, config.lora, ctx.seed
        )
        if unpaired:
            work = kto(
                policy,
                rated,
                other_completions(rated),
                ctx.device,
                KtoObjective(params.beta, params.desirable_weight, params.undesirable_weight),
            )
        else:
            objective = PreferenceObjective(
                params.loss,
                params.beta,
                label_smoothing=params.label_smoothing,
                margin=params.margin,
                nll_coef=params.nll_coef,
            )
            work = preference(policy, pairs, ctx.device, objective)
        learner = fresh_learner(ctx, ranks, policy, params, config.precision)
        shown = ["loss", "label_accuracy" if unpaired else "preference_accuracy"]
        history = train(ctx, {"policy": learner}, plan, work, shown=shown, ranks=ranks)
        hashes = save_learner(
            learner, out["model"], tokenizer_from=inputs["policy"], lora=config.lora, ranks=ranks
        )
        ctx.wrote_all(hashes)
    start_state(out["state"])
    return {
        **last_epoch_means(history, plan),
        "num_rows": num_rows,
        "num_steps": plan.num_steps,
    }


def _pairs(inputs: Mapping[str, Path], params: PreferenceParams) -> list[Pair]:
    reader = f"preference.loss {params.loss}"
    rows = read_role(inputs["preferences"], PreferenceRow, "preferences", reader)
    reference = read_parquet(inputs["reference"], PairLogprobsRow)
    _check_beside(rows, reference, inputs["reference"])
    return [
        {**row, "chosen_ref": logprobs["chosen"], "rejected_ref": logprobs["rejected"]}
        for row, logprobs in zip(rows, reference, strict=True)
    ]


def _rated(inputs: Mapping[str, Path], params: PreferenceParams) -> list[KtoRow]:
    reader = f"preference.loss {params.loss}"
    rows = read_role(inputs["feedback"], FeedbackRow, "feedback", reader)
    reference = read_parquet(inputs["reference"], FeedbackLogprobsRow)
    _check_beside(rows, reference, inputs["reference"])
    num_desirable = sum(row["rating"] > params.desirable_above for row in rows)
    if num_desirable in (0, len(rows)):
        raise StageError(
            f"{num_desirable} of {len(rows)} responses in the feedback are desirable (rated above "
            f"preference.desirable_above {params.desirable_above}): KTO needs some of either kind"
        )
    return [
        {
            **row,
            "desirable": row["rating"] > params.desirable_above,
            "ref": logprobs["completion"],
            "other_ref": logprobs["other"],
        }
        for row, logprobs in zip(rows, reference, strict=True)
    ]


def _check_beside(
    rows: Sequence[FeedbackRow] | Sequence[PreferenceRow],
    reference: Sequence[FeedbackLogprobsRow] | Sequence[PairLogprobsRow],
    path: Path,
) -> None:
    """StageError unless the reference's rows are of these rows."""
    if [row["prompt_id"] for row in rows] != [row["prompt_id"] for row in reference]:
        raise StageError(
            f"{path} does not belong to these preferences: run reference_logprobs again"
        )
