"""reward_model: a scalar reward learnt from pairs (Bradley–Terry), ratings, or labelled steps.

It starts from the base model, not from the SFT policy, so that the two train side by side; or from
a folder of the user's. With no epochs, a finished one is taken as it is. Two
departures from Ouyang et al. (2022): pairs are compared at every token from the first that differs,
unless `compared` says otherwise; and after training on pairs the head is scaled so that rewards of
training responses have standard deviation 1. Only differences of such rewards bear meaning, and a
KL coefficient or a value clip then means the same for every reward model. Ratings and probabilities
of steps have a scale of their own and keep it.

reward.json in the model's folder says how a response's reward is read off the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stages.algorithms.loss import Counts, Loss, Tokens
from stages.algorithms.reward_loss import (
    bradley_terry_loss,
    last_token_only,
    process_loss,
    regression_loss,
    tokens_that_differ,
)
from stages.context import Context, StageError
from stages.contracts.objectives import RewardObjective
from stages.contracts.reward_model import (
    Compared,
    RewardModelConfig,
    RewardModelParams,
    RewardStart,
)
from stages.data.artifacts import read_parquet, read_role, write_json
from stages.data.batching import Batch, collate
from stages.data.finite import check_finite, row_name
from stages.data.schema import FeedbackRow, PreferenceRow, StepsRow
from stages.data.tokenizer import Decoder
from stages.engines.forward.packing import pack
from stages.engines.forward.scalars import sequence_rewards, token_scores
from stages.engines.models.folders import pad_id, save_model, start_scalar_model
from stages.engines.models.loaders import fresh
from stages.engines.models.lora import open_for_training, unwrapped
from stages.engines.models.scalar_start import Start, is_classifier, start_of
from stages.engines.models.unread import to_learn
from stages.engines.processes.ranks import Ranks, join
from stages.engines.processes.shared_pass import Group, over_groups
from stages.engines.training.learner import AnyLearner
from stages.engines.training.loop import (
    Rows,
    Step,
    Work,
    cosine_plan,
    counted,
    fresh_learner,
    last_epoch_means,
    train,
)
from stages.engines.training.saving import save_learner
from stages.learning.pairs import pair_length, paired_batch
from stages.rewards.model import RewardRule
from stages.rewards.verifier import pairwise_accuracy

SCALED_BY = 512
"""Training pairs whose rewards set the scale."""
Data = Sequence[Mapping[str, Any]]
DATA: Mapping[RewardObjective, tuple[str, type[Mapping[str, Any]]]] = {
    RewardObjective.BRADLEY_TERRY: ("preferences", PreferenceRow),
    RewardObjective.REGRESSION: ("feedback", FeedbackRow),
    RewardObjective.PROCESS: ("steps", StepsRow),
}


def run(
    config: RewardModelConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.reward_model
    start: Start = start_scalar_model
    source = inputs["base"]
    if params.start is RewardStart.FOLDER:
        source = inputs["start"]
        start = start_of(source, inputs["base"], params.label)
    if not params.epochs:
        return _as_it_is(config, start, source, inputs, out, ctx)
    name, kind = DATA[params.objective]
    rows = read_role(inputs[name], kind, name, f"reward_model.objective {params.objective}")
    held_out = read_parquet(inputs["held_out_preferences"], PreferenceRow)
    rule = _rule(params, inputs["base"])
    if params.objective is RewardObjective.PROCESS:
        _check_steps(rows, rule)
    plan = cosine_plan(params, len(rows), ctx.seed)
    with join(ctx) as ranks:
        model = open_for_training(to_learn(start, ctx), source, ctx.loads_on, config.lora, ctx.seed)
        work = _WORK[params.objective](model, rows, params, ctx.device)
        learner = fresh_learner(ctx, ranks, model, params, config.precision)
        shown = ["loss", "grad_norm"]
        work = replace(work, dropout=True)
        history = train(ctx, {"reward_model": learner}, plan, work, shown=shown, ranks=ranks)
        if params.objective is RewardObjective.BRADLEY_TERRY:
            _scale_rewards(learner, rows[:SCALED_BY], ctx, ranks)
        rewards = _all_pair_rewards(model, rule, held_out, ctx)
        hashes = save_learner(
            learner, out["model"], tokenizer_from=inputs["base"], lora=config.lora, ranks=ranks
        )
        ctx.wrote_all(hashes)
    quality = _measured(rewards, rule, held_out, out["model"], ctx)
    means = last_epoch_means(history, plan)
    return {
        **{name: value for name, value in means.items() if name not in quality},
        **{name: value for name, value in quality.items() if value is not None},
        "num_steps": plan.num_steps,
    }


def _as_it_is(
    config: RewardModelConfig,
    start: Start,
    source: Path,
    inputs: Mapping[str, Path],
    out: Mapping[str, Path],
    ctx: Context,
) -> dict[str, float | int]:
    """A finished reward model, only measured: rank 0 copies it, and all ranks read the copy."""
    if not is_classifier(source):
        raise StageError(
            f"reward_model.epochs is 0, but {source} holds a language model, and an untrained head "
            "gives every response the reward 0: name a finished reward model, or set epochs to 1"
        )
    rule = _rule(config.reward_model, inputs["base"])
    held_out = read_parquet(inputs["held_out_preferences"], PreferenceRow)
    with join(ctx) as ranks:
        copy = ranks.same(out["model"])
        if not ranks.rank:
            save_model(start(source, "cpu"), copy, tokenizer_from=inputs["base"])
        ranks.meet("the copy of the reward model")
        model = fresh(ctx).scalar(copy, ctx.device, config.precision)
        rewards = _all_pair_rewards(model, rule, held_out, ctx)
    quality = _measured(rewards, rule, held_out, out["model"], ctx)
    known = {name: value for name, value in quality.items() if value is not None}
    return {**known, "num_steps": 0}


def _measured(
    rewards: tuple[torch.Tensor, torch.Tensor],
    rule: RewardRule,
    held_out: Data,
    folder: Path,
    ctx: Context,
) -> dict[str, float | None]:
    """How well it ranks held-out pairs; kept in its folder, beside the rule that reads it."""
    chosen, rejected = rewards
    quality = {
        "pairwise_accuracy": pairwise_accuracy(
            zip(chosen.tolist(), rejected.tolist(), strict=True)
        ),
        "reward_margin": float((chosen - rejected).mean()) if held_out else None,
    }
    rule.save(folder)
    write_json(folder / "quality.json", quality)
    ctx.table(
        "samples",
        [
            {"prompt": pair["prompt"], "response": pair[side], "reward": reward}
            for pair, *of_pair in list(
                zip(held_out, chosen.tolist(), rejected.tolist(), strict=True)
            )[:16]
            for side, reward in zip(("chosen", "rejected"), of_pair, strict=True)
        ],
    )
    return quality


def _from_pairs(model: Any, pairs: Data, params: RewardModelParams, device: str) -> Work:
    def loss(rows: Rows, step: Step) -> Loss:
        some = [pairs[i] for i in rows]
        batch = paired_batch(model, some, device)
        chosen, rejected = _scores_along(model, batch).chunk(2)
        mask = tokens_that_differ(*batch.response_ids.chunk(2), *batch.response_mask.chunk(2))
        if params.compared is Compared.LAST_TOKEN:
            mask = last_token_only(mask)
        margins = torch.tensor([pair["margin"] or 0.0 for pair in some], device=device)
        return bradley_terry_loss(
            chosen, rejected, mask, step.counts, centre=params.centre, margins=margins
        )

    def counts(rows: Rows) -> Counts:
        # Equal responses have no token that differs, and nothing to say about preferences.
        differ = [i for i in rows if pairs[i]["chosen_ids"] != pairs[i]["rejected_ids"]]
        sides = ("chosen_ids", "rejected_ids")
        num_tokens = sum(len(pairs[i][side]) for i in rows for side in sides)
        return Counts(num_tokens, max(len(differ), 1))

    return Work(
        counts,
        loss,
        describe=lambda i: row_name("preference", i, pairs[i]),
        length=lambda i: pair_length(pairs[i]),
    )


def _from_ratings(model: Any, rated: Data, params: RewardModelParams, device: str) -> Work:  # noqa: ARG001
    def loss(rows: Rows, step: Step) -> Loss:
        batch = _completions(model, [rated[i] for i in rows], device)
        ratings = torch.tensor([rated[i]["rating"] for i in rows], device=device)
        return regression_loss(sequence_rewards(model, batch), ratings, step.counts)

    num_tokens = [len(row["completion_ids"]) for row in rated]
    name_of = lambda i: row_name("feedback", i, rated[i])  # noqa: E731
    return Work(
        counted(num_tokens), loss, describe=name_of, length=lambda i: _completion_length(rated[i])
    )


def _check_steps(data: Data, rule: RewardRule) -> None:
    """StageError where steps end elsewhere than scoring will take them to end."""
    for number, row in enumerate(data):
        ids = row["completion_ids"]
        step_ends = {i for i, token in enumerate(ids) if token == rule.step_token} | {len(ids) - 1}
        if step_ends != set(row["step_ends"]):
            raise StageError(
                f"row {number} of the labelled steps (prompt {row['prompt']!r}) has steps that do "
                "not end where reward_model.step_separator stands: in a response the model could "
                "not tell them apart. End each step but the last with it, and use it nowhere else"
            )


def _from_steps(model: Any, data: Data, params: RewardModelParams, device: str) -> Work:  # noqa: ARG001
    def loss(rows: Rows, step: Step) -> Loss:
        some = [data[i] for i in rows]
        batch = _completions(model, some, device)
        ends = torch.zeros_like(batch.response_mask)
        labels = torch.zeros_like(batch.response_mask)
        for index, row in enumerate(some):
            ends[index, row["step_ends"]] = 1.0
            labels[index, row["step_ends"]] = torch.tensor(row["step_labels"], device=device)
        return process_loss(_scores_along(model, batch), labels, Tokens.padded(ends), step.counts)

    num_steps = [len(row["step_ends"]) for row in data]
    name_of = lambda i: row_name("labelled steps", i, data[i])  # noqa: E731
    return Work(
        counted(num_steps), loss, describe=name_of, length=lambda i: _completion_length(data[i])
    )


_WORK = {
    RewardObjective.BRADLEY_TERRY: _from_pairs,
    RewardObjective.REGRESSION: _from_ratings,
    RewardObjective.PROCESS: _from_steps,
}


def _completion_length(row: Mapping[str, Any]) -> int:
    return len(row["prompt_ids"]) + len(row["completion_ids"])


def _completions(model: Any, rows: Data, device: str) -> Batch:
    return collate(
        [row["prompt_ids"] for row in rows],
        [row["completion_ids"] for row in rows],
        pad_id(model),
        device,
    )


def _rule(params: RewardModelParams, base: Path) -> RewardRule:
    if params.objective is not RewardObjective.PROCESS:
        return RewardRule()
    ids = Decoder(base).ids(params.step_separator)
    if len(ids) != 1:
        raise StageError(
            f"reward_model.step_separator {params.step_separator!r} is {len(ids)} tokens for this "
            "tokenizer: choose a text that is one token"
        )
    return RewardRule(step_token=ids[0], step_reward=params.step_reward)


def _scores_along(model: Any, batch: Batch) -> torch.Tensor:
    """[B, T] the score at each response token; past a response's end, that of its last token."""
    at = torch.minimum(batch.before + 1, batch.last[:, None])
    return token_scores(model, batch).gather(1, at)


def _scale_rewards(learner: AnyLearner, pairs: Data, ctx: Context, ranks: Ranks) -> None:
    """Divide the head by the standard deviation of the rewards of training responses."""
    rewards = torch.cat(_all_pair_rewards(learner.model, RewardRule(), pairs, ctx))
    scale = float(rewards.std(correction=0))
    if scale > 0:
        of_head = {id(parameter) for parameter in unwrapped(learner.model).score.parameters()}
        named = learner.model.named_parameters()
        names = [f"weight.{name}" for name, one in named if id(one) in of_head]
        learning = [name for name in names if name in learner.held()]
        learner.load({name: _whole(learner, name, ranks) / scale for name in learning})


def _whole(learner: AnyLearner, name: str, ranks: Ranks) -> torch.Tensor:
    """A small tensor, on every rank."""
    whole = learner.whole(name)
    tensor = ranks.same(whole if whole is None else whole.cpu())
    assert tensor is not None
    return tensor


@torch.no_grad()
def _all_pair_rewards(
    model: Any, rule: RewardRule, pairs: Data, ctx: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] rewards of the chosen and of the rejected responses; the ranks share the pairs.

    A kill costs this pass again, and the training since the last checkpoint: it is forward only,
    over pairs that are few beside those of training.
    """
    sides = {side: torch.empty(len(pairs)) for side in ("chosen", "rejected")}
    groups = pack([pair_length(pair) for pair in pairs], ctx.micro_tokens)

    def compute(group: Group) -> tuple[torch.Tensor, ...]:
        batch = paired_batch(model, [pairs[i] for i in group], ctx.device)
        return rule.rewards(model, batch).cpu().chunk(2)

    for group, rewards in over_groups(ctx, groups, compute, "rewards of pairs"):
        for (side, of_side), values in zip(sides.items(), rewards, strict=True):
            for index, value in zip(group, values.tolist(), strict=True):
                name = row_name("preference", index, pairs[index])
                check_finite(f"the reward of the {side} response", name, value)
            of_side[list(group)] = values
    return sides["chosen"], sides["rejected"]
