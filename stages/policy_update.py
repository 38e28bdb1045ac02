"""policy_update: one iteration of learning from scored rollouts, by the algorithm that `rl` names.

Policy gradients are in learning/policy_gradient.py, iterated DPO in learning/online_pairs.py,
rejection sampling in learning/best_of_n.py, distillation in learning/distillation.py. Here is what
they share: the rollouts must come from this very policy; groups whose rewards are all equal may be
dropped for others (dynamic sampling); the policy and what the next iteration needs are saved, and
which samples it was trained on, in which role and with which advantages.

At most two models are in memory: the policy and, for PPO, the critic.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stages.algorithms.groups import refill, share_of_zero_variance, zero_variance
from stages.context import Context, StageError
from stages.contracts.policy_update import PolicyUpdateConfig
from stages.contracts.rl import Algorithm
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.batching import loss_mask
from stages.data.finite import check_finite, sample_name
from stages.data.schema import ExperienceRow, RolloutRow, ScoredRollout, ScoreRow
from stages.data.seeds import draw_order
from stages.engines.models.folders import load_policy
from stages.engines.models.loaders import fresh
from stages.engines.models.lora import open_for_training
from stages.engines.models.unread import to_learn
from stages.engines.processes.ranks import Ranks, join
from stages.engines.training.learner import AnyLearner
from stages.engines.training.rl_state import RlState, load_state, save_state
from stages.engines.training.saving import sampling_hash, save_learner
from stages.learning.best_of_n import learn_from_the_best
from stages.learning.critic import load_critic
from stages.learning.distillation import learn_from_a_teacher
from stages.learning.experience import group_numbers
from stages.learning.online_pairs import learn_from_own_pairs
from stages.learning.policy_gradient import learn_by_policy_gradient
from stages.learning.update import Rollouts, Update, UpdateResult, continued_learner
from stages.standard_error import error_metric, standard_error

UPDATES = {
    Algorithm.DPO: learn_from_own_pairs,
    Algorithm.BEST_OF_N: learn_from_the_best,
    Algorithm.DISTILL: learn_from_a_teacher,
}


def run(
    config: PolicyUpdateConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    scored = scored_rollouts(
        read_parquet(inputs["rollouts"], RolloutRow),
        read_parquet(inputs["scores"], ScoreRow),
        f"{inputs['scores']} does not belong to {inputs['rollouts']}",
    )
    state = load_state(inputs["state"], config.lora, inputs["policy"])
    with join(ctx) as ranks:
        learners = open_learners(config, inputs, ctx, ranks, state)
        check_sampled_by(sampling_hash(learners["policy"], ranks), scored)
        update = Update(config, inputs, ctx, ranks, state, learners, scored, load=fresh(ctx))
        outcome, metrics = learn(update)
        steps = state.steps + len(outcome.history)
        ctx.wrote_all(save(config, inputs, out, steps, learners, outcome.kl_coef, ranks))
    write_parquet(out["experience"], outcome.experience, ExperienceRow)
    return metrics


def open_learners(
    config: PolicyUpdateConfig,
    inputs: Mapping[str, Path],
    ctx: Context,
    ranks: Ranks,
    state: RlState,
) -> dict[str, AnyLearner]:
    """The policy, and for PPO the critic, as the iteration before left them."""
    params = config.policy_update
    load = to_learn(load_policy, ctx)
    policy = open_for_training(load, inputs["policy"], ctx.loads_on, config.lora, ctx.seed)
    learners = {
        "policy": continued_learner(
            ctx, ranks, policy, "policy", params.learning_rate, config, state
        )
    }
    if config.algorithm is Algorithm.PPO:
        critic = load_critic(inputs, params.critic, config.reward, config.lora, ctx)
        learners["critic"] = continued_learner(
            ctx, ranks, critic, "critic", params.critic_learning_rate, config, state
        )
    return learners


def learn(update: Update) -> tuple[UpdateResult, dict[str, float | int]]:
    """What an iteration does to its learners, and its metrics; of all rollouts that were scored."""
    config, scored = update.config, update.rollouts
    greedy = {row["prompt_id"]: row["reward"] for row in scored if row["greedy"]}
    rollouts: Rollouts = [row for row in scored if not row["greedy"]]
    of_groups = _group_metrics(rollouts)
    if config.reserve:
        rollouts = with_variance(rollouts, config.prompts, update.ctx)
    update = replace(update, rollouts=rollouts, greedy=greedy)
    outcome = UPDATES.get(config.algorithm, learn_by_policy_gradient)(update)
    by_sample = lambda row: (row["prompt_id"], row["sample_index"], row["role"])  # noqa: E731
    outcome = replace(outcome, experience=sorted(outcome.experience, key=by_sample))
    return outcome, _summary(outcome, rollouts) | of_groups


def save(
    config: PolicyUpdateConfig,
    inputs: Mapping[str, Path],
    out: Mapping[str, Path],
    steps: int,
    learners: Mapping[str, AnyLearner],
    kl_coef: float | None,
    ranks: Ranks,
) -> dict[Path, str]:
    """The policy, and what the next iteration needs beside it; all ranks.

    Returns the md5 of the files that were hashed on the way.
    """
    of_policy = save_learner(
        learners["policy"],
        out["model"],
        tokenizer_from=inputs["policy"],
        lora=config.lora,
        ranks=ranks,
    )
    of_state = save_state(
        out["state"],
        steps,
        learners,
        kl_coef=kl_coef,
        lora=config.lora,
        tokenizer_from=inputs["policy"],
        ranks=ranks,
    )
    return of_policy | of_state


def with_variance(rollouts: Rollouts, wanted: int, ctx: Context) -> list[ScoredRollout]:
    """The groups of the first `wanted` prompts, in the order they were drawn, that can teach."""
    rewards = torch.tensor([row["reward"] for row in rollouts])
    flat = zero_variance(rewards, group_numbers(rollouts)).tolist()
    varied = {row["prompt_id"] for row, is_flat in zip(rollouts, flat, strict=True) if not is_flat}
    order = draw_order({row["prompt_id"] for row in rollouts}, ctx.seed, str(ctx.key))
    kept = set(refill(order, varied, wanted))
    if not kept:
        raise StageError(
            "the responses to each prompt all have the same reward, so there is nothing to learn "
            "from: draw easier or harder prompts, or raise rollout.samples or rollout.reserve"
        )
    return [row for row in rollouts if row["prompt_id"] in kept]


def _group_metrics(rollouts: Rollouts) -> dict[str, float | int]:
    """Of all that was sampled, the share of prompts that cannot teach; of groups, not of one."""
    groups = group_numbers(rollouts)
    if int(groups.max()) + 1 == len(groups):
        return {}
    rewards = torch.tensor([row["reward"] for row in rollouts])
    return {"zero_variance_share": share_of_zero_variance(rewards, groups)}


def scored_rollouts(
    rollouts: Sequence[RolloutRow], scores: Sequence[ScoreRow], complaint: str
) -> list[ScoredRollout]:
    """Rollout rows with their reward and reference log-probs; `complaint` if they do not fit."""
    keys = (
        [(row["prompt_id"], row["sample_index"]) for row in rollouts],
        [(row["prompt_id"], row["sample_index"]) for row in scores],
    )
    if keys[0] != keys[1]:
        raise StageError(f"{complaint}: their rows differ. Run score again.")
    for row in scores:
        check_finite("the reward", sample_name(row), row["reward"], "run score again")
        check_finite("the reference's log-prob", sample_name(row), row["ref_logprobs"] or [])
    return [{**row, **score} for row, score in zip(rollouts, scores, strict=True)]


def check_sampled_by(expected: str, rollouts: Rollouts) -> None:
    """StageError where they come from another policy than the one of that hash."""
    sampled_by = {row["policy_hash"] for row in rollouts}
    if sampled_by != {expected}:
        names = ", ".join(sorted(name[:12] for name in sampled_by))
        raise StageError(
            f"the rollouts were sampled by policy {names}, but the policy to train is "
            f"{expected[:12]}: run rollout again from this policy"
        )


def _summary(outcome: UpdateResult, rollouts: Rollouts) -> dict[str, float | int]:
    summary: dict[str, float | int] = {}
    for name in outcome.history[0]:
        values = [step[name] for step in outcome.history]
        if name.endswith("_min"):
            summary[name] = min(values)
        elif name.endswith("_max"):
            summary[name] = max(values)
        else:
            summary[name] = statistics.fmean(values)
    rewards = [row["reward"] for row in rollouts]
    prompts = [row["prompt_id"] for row in rollouts]
    return summary | {
        **outcome.metrics,
        "reward_mean": statistics.fmean(rewards),
        **error_metric("reward_mean", standard_error(rewards, prompts)),
        "reward_std": statistics.pstdev(rewards),
        "response_length": statistics.fmean(sum(loss_mask(row)) for row in rollouts),
        "truncation_rate": statistics.fmean(row["finish_reason"] == "length" for row in rollouts),
        "num_prompts": len(set(prompts)),
        "num_responses": len(rollouts),
        "num_steps": len(outcome.history),
    }
