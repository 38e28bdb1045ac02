"""Policy gradients: PPO, GRPO, RLOO, REINFORCE, REINFORCE++ and ReMax.

They differ in their advantages (learning/experience.py) and share the rest: the objective that
`policy_update.objective` names, KL in the reward or in the loss, an entropy bonus.

PPO (Schulman et al. 2017, as in Ouyang et al. 2022) has a critic with a backbone of its own.
Departure: each iteration first fits the critic to its rollouts and only then takes advantages from
it. An iteration is many optimizer steps, and advantages from a critic that is one iteration late
push probabilities about for no reason, which can undo what the iteration before has learnt.

Probability ratios are taken against the old log-probs (learning/old_logprobs.py), which the trainer
itself computes; the sampler's are compared with them (algorithms/mismatch.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from stages.algorithms.advantages import discounted_returns
from stages.algorithms.kl import kl_loss, next_kl_coef, reported_kl
from stages.algorithms.loss import Loss, LossAggregation, MetricPart, Per, Tokens
from stages.algorithms.policy_loss import Objective, entropy_bonus, policy_loss
from stages.algorithms.value_loss import value_loss
from stages.context import StageError
from stages.contracts.objectives import Aggregation, KlPlace, PolicyObjective
from stages.contracts.policy_update import PolicyUpdateParams
from stages.contracts.rl import Algorithm
from stages.data.batching import loss_mask
from stages.data.finite import sample_name
from stages.data.segments import cut
from stages.engines.forward.inference import response_batch, row_length
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.scalars import response_values
from stages.engines.training.learner import AnyLearner
from stages.engines.training.loop import Rows, Step, Work, counted, train
from stages.engines.training.resume import Metrics
from stages.learning.credit import discount_of, rewards_by_token
from stages.learning.experience import (
    Experience,
    Measured,
    as_sampled,
    check_kl,
    compare,
    critic_values,
    experience_of,
    has_reference,
    how_well_explained,
    measure,
    selected,
    token_penalties,
)
from stages.learning.old_logprobs import OnlyStep, old_logprobs, takes_one_step
from stages.learning.update import SampleRole, Update, UpdateResult, trained_on

KL = "kl_to_reference"
SHOWN = ("policy_loss", KL, "entropy")


def learn_by_policy_gradient(update: Update) -> UpdateResult:
    """One iteration of any of these algorithms."""
    config, params = update.config, update.config.policy_update
    kl_coef = params.kl_coef
    if params.kl_target is not None and update.state.kl_coef is not None:
        kl_coef = update.state.kl_coef
    only_step = OnlyStep() if takes_one_step(update, kl_coef) else None
    if only_step is None:
        measured = measure(update.ctx, update.policy.model, update.rollouts, config)
    else:
        measured = as_sampled(update.rollouts)
    metrics: dict[str, float | int] = {"kl_coef": kl_coef}
    if config.algorithm is Algorithm.PPO:
        critic = update.learners["critic"]
        _fit_critic(update, critic, measured, kl_coef)
        values = critic_values(update.ctx, critic.model, update.rollouts)
        experience = experience_of(update, measured, kl_coef, values)
        metrics["explained_variance"] = how_well_explained(experience)
    else:
        experience = experience_of(update, measured, kl_coef)
    rows = rows_to_learn_from(update)
    history = ascend(update, rows, experience, kl_coef, only_step)
    if only_step is not None:
        measured = compare(only_step.logprobs(measured.mask.shape), update.rollouts, config)
    metrics |= measured.metrics() | experience.metrics()
    if params.kl_target is not None:
        kl_coef = next_kl_coef(
            kl_coef,
            measured.kl_per_response,
            target=params.kl_target,
            horizon=params.kl_horizon,
            num_sequences=len(update.rollouts),
        )
    learnt = [update.rollouts[i] for i in rows]
    used = trained_on(learnt, SampleRole.POLICY_GRADIENT, experience.advantages[rows])
    return UpdateResult(history, used, metrics, kl_coef)


def learns_whole(params: PolicyUpdateParams) -> bool:
    """Whether the segments of a response have to go through the model together: a token's loss
    depends on the other tokens of its response then, wherever these were sampled."""
    by_length = params.aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    return params.objective is PolicyObjective.GSPO or by_length


def rows_to_learn_from(update: Update) -> list[int]:
    """All rollouts, or with `overlong_filter` those that were not truncated."""
    rows = range(len(update.rollouts))
    if not update.config.policy_update.overlong_filter:
        return list(rows)
    ended = [i for i in rows if update.rollouts[i]["finish_reason"] != "length"]
    if not ended:
        raise StageError(
            "policy_update.overlong_filter leaves nothing to learn from: every response was cut at "
            "rollout.max_new_tokens. Raise that, or switch the filter off"
        )
    return ended


def ascend(
    update: Update,
    rows: Sequence[int],
    experience: Experience,
    kl_coef: float,
    only_step: OnlyStep | None = None,
) -> list[Metrics]:
    """Train on `rows` of the experience; the critic too, where there is one."""
    return train(
        update.ctx,
        update.learners,
        update.plan(len(rows)),
        _work(update, rows, experience, kl_coef, only_step),
        shown=[name for name in SHOWN if name != KL or has_reference(update.rollouts)],
        ranks=update.ranks,
    )


def _work(
    update: Update,
    learnt: Sequence[int],
    experience: Experience,
    kl_coef: float,
    only_step: OnlyStep | None,
) -> Work:
    config, params = update.config, update.config.policy_update
    rollouts, device = update.rollouts, update.ctx.device
    policy = update.policy.model
    critic = update.learners["critic"].model if "critic" in update.learners else None
    measures_kl = has_reference(rollouts)
    pieces, parts = cut(rollouts, learnt, whole=learns_whole(params))
    objective = Objective(
        kind=params.objective,
        clip_low=params.clip_low,
        clip_high=params.clip_high,
        dual_clip=params.dual_clip,
        aggregation=LossAggregation(
            params.aggregation, params.length_scale or float(config.max_new_tokens)
        ),
    )

    def loss(numbers: Rows, step: Step) -> Loss:
        some = [pieces[i] for i in numbers]
        batch = response_batch(policy, [piece.row for piece in some], device)
        tokens = Tokens.padded(batch.loss_mask)
        of_rows = experience.select(some, num_steps=batch.response_mask.shape[1], device=device)
        current = response_logprobs(policy, batch, config.temperature)
        old = old_logprobs(
            current.logprobs, of_rows.logprobs, [each.of for each in some], only_step
        )
        total = policy_loss(
            current.logprobs,
            old,
            of_rows.advantages,
            tokens,
            step.counts,
            objective,
            weights=of_rows.weights,
        )
        bonus = entropy_bonus(current.entropies, tokens, step.counts, objective.aggregation)
        metrics = {**total.metrics, **bonus.metrics}
        if measures_kl:
            divergence = reported_kl(current.logprobs.detach(), of_rows.ref_logprobs, old)
            metrics[KL] = MetricPart(tokens.total(divergence), Per.TOKEN)
        total = replace(total, metrics=metrics)
        if params.entropy_coef:
            total = total.plus(bonus, params.entropy_coef)
        if kl_coef and params.kl_in is KlPlace.LOSS:
            penalty = kl_loss(
                current.logprobs,
                old,
                of_rows.ref_logprobs,
                tokens,
                step.counts,
                params.kl_estimator,
                objective.aggregation,
            )
            total = total.plus(penalty, kl_coef)
        if critic is not None:
            # It has a backbone of its own, so the two losses share no gradient and no weight.
            fit = value_loss(
                response_values(critic, batch),
                of_rows.values,
                of_rows.returns,
                tokens,
                step.counts,
                clip=params.value_clip,
            )
            total = total.plus(fit)
        return total

    return Work(
        counted([sum(loss_mask(rollouts[i])) for i in learnt]),
        loss,
        parts=lambda i: parts[i],
        describe=lambda i: sample_name(pieces[i].row),
        length=lambda i: row_length(pieces[i].row),
        check=lambda metrics: check_kl(metrics.get(KL, 0.0), params),
    )


def _fit_critic(update: Update, critic: AnyLearner, measured: Measured, kl_coef: float) -> None:
    """Fit the critic to the discounted returns of the rollouts."""
    params, rollouts = update.config.policy_update, update.rollouts
    device = update.ctx.device
    returns = discounted_returns(
        rewards_by_token(rollouts, token_penalties(measured, params, kl_coef), measured.mask),
        measured.mask,
        gamma=discount_of(update.config, rollouts, measured.mask),
    )

    pieces, parts = cut(rollouts, range(len(rollouts)))

    def loss(numbers: Rows, step: Step) -> Loss:
        some = [pieces[i] for i in numbers]
        batch = response_batch(critic.model, [piece.row for piece in some], device)
        target = selected(returns, some, batch.response_mask.shape[1]).to(device)
        values = response_values(critic.model, batch)
        tokens = Tokens.padded(batch.loss_mask)
        return value_loss(values, values.detach(), target, tokens, step.counts, clip=None)

    train(
        update.ctx,
        {"critic": critic},
        update.plan(len(rollouts), epochs=params.critic_warmup_epochs),
        Work(
            counted([sum(loss_mask(row)) for row in rollouts]),
            loss,
            parts=lambda i: parts[i],
            describe=lambda i: sample_name(pieces[i].row),
            length=lambda i: row_length(pieces[i].row),
        ),
        shown=["loss"],
        before="critic_fit",
        ranks=update.ranks,
    )
