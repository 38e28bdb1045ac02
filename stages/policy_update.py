"""policy_update: one iteration of learning from scored rollouts, by PPO or GRPO.

PPO (Schulman et al. 2017, as in Ouyang et al. 2022): the reward of a response falls on its last
token, each token pays kl_coef times its log-ratio to the SFT policy, a critic with a backbone of
its own and GAE turn that into advantages, which are whitened over the whole rollout batch. The
critic starts from the reward model where there is one, else from the policy's backbone under a zero
head. Departure: each iteration first fits the critic to its rollouts and only then takes advantages
from it. An iteration is many optimizer steps, and advantages from a critic that is one iteration
late push probabilities about for no reason, which can undo what the iteration before has learnt.

GRPO (Shao et al. 2024): the advantage of a response is its reward against the mean of its group;
no critic; kl_loss_coef weighs a KL term (k3) in the loss. Departures: losses are averaged over all
tokens of the optimizer step, not within each response first, so that long responses count in full;
and the KL term is weighted by the probability ratio, which makes it one of the current policy.

Probability ratios are taken against log-probs that the trainer itself computed before the first
step; those of the sampler are compared with them, and a gap stops the update. At most the policy
and the critic are in memory.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.algorithms.kl import k3
from stages.algorithms.policy_loss import clipped_policy_loss
from stages.algorithms.value_loss import clipped_value_loss
from stages.context import Context, StageError
from stages.contracts.policy_update import PolicyUpdateConfig, PolicyUpdateParams
from stages.contracts.rl import Algorithm
from stages.data.artifacts import read_parquet
from stages.data.batching import collate
from stages.engines.experience import Experience, measure, ppo_experience
from stages.engines.models import (
    content_hash,
    load_policy,
    pad_id,
    response_logprobs,
    response_values,
    save_model,
)
from stages.engines.optimizer import Learner
from stages.engines.ranks import Ranks, join
from stages.engines.rl_state import load_critic, load_state, save_state
from stages.engines.training import Metrics, Micro, Plan, Rows, train, warmup_then_constant

WARMUP_STEPS = 5
"""Optimizer steps, counted over all iterations, in which the learning rate rises to its value."""


def run(
    config: PolicyUpdateConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.policy_update
    rollouts = _scored_rollouts(inputs)
    state = load_state(inputs["state"])
    plan = Plan(
        num_rows=len(rollouts),
        batch_size=params.batch_size,
        epochs=params.epochs,
        seed=ctx.seed,
        learning_rate=warmup_then_constant(state.steps, WARMUP_STEPS),
    )
    with join(ctx) as ranks:
        policy = load_policy(inputs["policy"], ctx.device)
        _check_same_policy(policy, rollouts)
        learners = {
            "policy": Learner(
                policy, learning_rate=params.learning_rate, max_grad_norm=params.max_grad_norm
            )
        }
        if config.algorithm is Algorithm.PPO:
            critic = load_critic(inputs, config.reward, ctx.device)
            learners["critic"] = Learner(
                critic,
                learning_rate=params.critic_learning_rate,
                max_grad_norm=params.max_grad_norm,
            )
        for name, learner in learners.items():
            learner.load_moments(state.moments(name))
        experience = measure(ctx, policy, rollouts, params, config.temperature)
        _check_experience(experience, params)
        if config.algorithm is Algorithm.PPO:
            _fit_critic(ctx, ranks, params, learners["critic"], rollouts, experience, state.steps)
            experience = ppo_experience(ctx, critic, rollouts, params, experience)
        history = train(
            ctx,
            learners,
            plan,
            lambda rows, step_rows: _micro_loss(
                config, ctx.device, learners, rollouts, experience, rows, step_rows
            ),
            shown=["policy_loss", "kl_to_reference", "entropy"],
            check=lambda metrics: _check_kl(metrics["kl_to_reference"], params),
            ranks=ranks,
        )

    save_model(policy, out["model"], tokenizer_from=inputs["policy"])
    save_state(
        out["state"], state.steps + plan.num_steps, learners, tokenizer_from=inputs["policy"]
    )
    return _summary(history, experience, rollouts)


def _fit_critic(
    ctx: Context,
    ranks: Ranks,
    params: PolicyUpdateParams,
    critic: Learner,
    rollouts: Sequence[Mapping[str, Any]],
    measured: Experience,
    steps_before: int,
) -> None:
    """Fit the critic to the returns of the rollouts, which lambda 1 takes from rewards alone."""
    returns = ppo_experience(ctx, critic.model, rollouts, params, measured, lam=1.0).returns

    def micro_loss(rows: Rows, step_rows: Rows) -> Micro:
        batch = collate(
            [rollouts[i]["prompt_ids"] for i in rows],
            [rollouts[i]["response_ids"] for i in rows],
            pad_id(critic.model),
            ctx.device,
        )
        target = returns[list(rows), : batch.response_mask.shape[1]].to(ctx.device)
        values = response_values(critic.model, batch)
        error = 0.5 * ((values - target).square() * batch.response_mask).sum()
        return Micro(error / sum(len(rollouts[i]["response_ids"]) for i in step_rows), {})

    plan = Plan(
        num_rows=len(rollouts),
        batch_size=params.batch_size,
        epochs=params.critic_warmup_epochs,
        seed=ctx.seed,
        learning_rate=warmup_then_constant(steps_before, WARMUP_STEPS),
    )
    learners = {"critic": critic}
    train(ctx, learners, plan, micro_loss, shown=["loss"], before="critic_fit", ranks=ranks)


def _micro_loss(
    config: PolicyUpdateConfig,
    device: str,
    learners: Mapping[str, Learner],
    rollouts: Sequence[Mapping[str, Any]],
    experience: Experience,
    rows: Rows,
    step_rows: Rows,
) -> Micro:
    params = config.policy_update
    policy = learners["policy"].model
    batch = collate(
        [rollouts[i]["prompt_ids"] for i in rows],
        [rollouts[i]["response_ids"] for i in rows],
        pad_id(policy),
        device,
    )
    num_tokens = sum(len(rollouts[i]["response_ids"]) for i in step_rows)
    old = experience.select(rows, num_steps=batch.response_mask.shape[1], device=device)
    now = response_logprobs(policy, batch, config.temperature)
    surrogate = clipped_policy_loss(
        now.logprobs,
        old.logprobs,
        old.advantages,
        batch.response_mask,
        clip_low=params.clip_low,
        clip_high=params.clip_high,
    )
    # The tokens were drawn from the policy before the update: weighted by the ratio, the estimate
    # is of the policy as it is now.
    ratio = (now.logprobs - old.logprobs).exp()
    kl = (ratio * k3(now.logprobs, old.ref_logprobs) * batch.response_mask).sum()
    loss = surrogate.loss
    metrics = {
        "policy_loss": surrogate.loss.detach() / num_tokens,
        "entropy": now.entropies.detach().sum() / num_tokens,
        "kl_to_reference": kl.detach() / num_tokens,
        "approx_kl": surrogate.approx_kl / num_tokens,
        "clip_fraction_low": surrogate.num_clipped_low / num_tokens,
        "clip_fraction_high": surrogate.num_clipped_high / num_tokens,
        "ratio_min": surrogate.ratio_min,
        "ratio_max": surrogate.ratio_max,
    }
    if config.algorithm is Algorithm.GRPO:
        loss = loss + params.kl_loss_coef * kl
    else:
        # The critic has a backbone of its own, so the two losses share no gradient and no weight.
        value_loss = clipped_value_loss(
            response_values(learners["critic"].model, batch),
            old.values,
            old.returns,
            batch.response_mask,
            clip=params.value_clip,
        )
        loss = loss + value_loss
        metrics["value_loss"] = value_loss.detach() / num_tokens
    return Micro(loss / num_tokens, metrics)


def _scored_rollouts(inputs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Rollout rows with their reward and reference log-probs."""
    rollouts, scores = read_parquet(inputs["rollouts"]), read_parquet(inputs["scores"])
    keys = [
        [(row["prompt_id"], row["sample_index"]) for row in rows] for rows in (rollouts, scores)
    ]
    if keys[0] != keys[1]:
        raise StageError(
            f"{inputs['scores']} does not belong to {inputs['rollouts']}: their rows differ. "
            "Run score again."
        )
    return [row | score for row, score in zip(rollouts, scores, strict=True)]


def _check_same_policy(policy: Any, rollouts: Sequence[Mapping[str, Any]]) -> None:
    expected, sampled_by = content_hash(policy), {row["policy_hash"] for row in rollouts}
    if sampled_by != {expected}:
        found = ", ".join(sorted(name[:12] for name in sampled_by))
        raise StageError(
            f"the rollouts were sampled by policy {found}, but the policy to train is "
            f"{expected[:12]}: run rollout again from this policy"
        )


def _check_experience(experience: Experience, params: PolicyUpdateParams) -> None:
    if not experience.logprob_gap_mean <= params.max_logprob_gap:
        raise StageError(
            f"trainer and sampler log-probs differ by {experience.logprob_gap_mean:.4g} on average "
            f"(policy_update.max_logprob_gap is {params.max_logprob_gap}): the two do not compute "
            "the same policy, in precision, kernels or temperature, and the update would learn "
            "from wrong ratios"
        )
    _check_kl(experience.kl_to_reference, params)


def _check_kl(kl: float, params: PolicyUpdateParams) -> None:
    if kl > params.max_kl:
        raise StageError(
            f"the policy is {kl:.3g} nats per token from the SFT policy, more than "
            f"policy_update.max_kl {params.max_kl}: raise policy_update.kl_coef (PPO) or "
            "kl_loss_coef (GRPO), or lower its learning_rate"
        )


def _summary(
    history: Sequence[Metrics], experience: Experience, rollouts: Sequence[Mapping[str, Any]]
) -> dict[str, float | int]:
    summary: dict[str, float | int] = {}
    for name in history[0]:
        values = [step[name] for step in history]
        if name.endswith("_min"):
            summary[name] = min(values)
        elif name.endswith("_max"):
            summary[name] = max(values)
        else:
            summary[name] = statistics.fmean(values)
    rewards = [row["reward"] for row in rollouts]
    return summary | {
        **experience.summary(),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "response_length": statistics.fmean(len(row["response_ids"]) for row in rollouts),
        "truncation_rate": statistics.fmean(row["finish_reason"] == "length" for row in rollouts),
        "num_steps": len(history),
    }
