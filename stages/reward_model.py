"""reward_model: a scalar reward learnt from preference pairs (Bradley–Terry).

It starts from the base model, not from the SFT policy, so that the two train side by side. Two
departures from Ouyang et al. (2022): pairs are compared at every token from the first that differs,
not only at the last; and after training the head is scaled so that rewards of training responses
have standard deviation 1. Only differences of rewards bear meaning, and a KL coefficient or a value
clip then means the same for every reward model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.algorithms.bradley_terry import bradley_terry_loss, tokens_that_differ
from stages.context import Context
from stages.contracts.reward_model import RewardModelConfig
from stages.data.artifacts import read_parquet, write_json
from stages.data.batching import Batch, collate
from stages.engines.models import (
    pad_id,
    save_model,
    sequence_rewards,
    start_scalar_model,
    token_scores,
)
from stages.engines.optimizer import Learner
from stages.engines.ranks import join
from stages.engines.training import Micro, Plan, Rows, train, warmup_then_cosine
from stages.rewards.verifier import pairwise_accuracy

SCALED_BY = 512
"""Training pairs whose rewards set the scale."""


def run(
    config: RewardModelConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.reward_model
    pairs = read_parquet(inputs["preferences"])
    held_out = read_parquet(inputs["held_out_preferences"])
    plan = Plan(
        num_rows=len(pairs),
        batch_size=params.batch_size,
        epochs=params.epochs,
        seed=ctx.seed,
        learning_rate=warmup_then_cosine(params.warmup_ratio),
    )
    with join(ctx) as ranks:
        model = start_scalar_model(inputs["base"], ctx.device)

        def micro_loss(chosen_rows: Rows, step_rows: Rows) -> Micro:
            batch = _paired_batch(model, [pairs[i] for i in chosen_rows], ctx.device)
            chosen, rejected = _scores_along(model, batch).chunk(2)
            mask = tokens_that_differ(*batch.response_ids.chunk(2), *batch.response_mask.chunk(2))
            loss = bradley_terry_loss(chosen, rejected, mask, centre=params.centre) / len(step_rows)
            with torch.no_grad():
                margin = chosen[:, -1] - rejected[:, -1]
                return Micro(
                    loss,
                    {
                        "train_accuracy": (margin > 0).sum() / len(step_rows),
                        "reward_margin": margin.sum() / len(step_rows),
                    },
                )

        learner = Learner(
            model,
            learning_rate=params.learning_rate,
            max_grad_norm=params.max_grad_norm,
            weight_decay=params.weight_decay,
        )
        shown = ["loss", "train_accuracy"]
        history = train(ctx, {"reward_model": learner}, plan, micro_loss, shown=shown, ranks=ranks)

    chosen, rejected = _all_pair_rewards(model, pairs[:SCALED_BY], ctx)
    scale = float(torch.cat([chosen, rejected]).std(correction=0))
    if scale > 0:
        model.score.weight.data.div_(scale)
    chosen, rejected = _all_pair_rewards(model, held_out, ctx)
    quality = {
        "pairwise_accuracy": pairwise_accuracy(
            zip(chosen.tolist(), rejected.tolist(), strict=True)
        ),
        "reward_margin": float((chosen - rejected).mean()),
    }
    save_model(model, out["model"], tokenizer_from=inputs["base"])
    write_json(out["model"] / "quality.json", quality)
    ctx.table(
        "samples",
        [
            {"prompt": pair["prompt"], "response": pair[side], "reward": reward}
            for pair, *rewards in list(
                zip(held_out, chosen.tolist(), rejected.tolist(), strict=True)
            )[:16]
            for side, reward in zip(("chosen", "rejected"), rewards, strict=True)
        ],
    )
    last_epoch = history[-plan.steps_per_epoch :]
    return {
        "loss": sum(step["loss"] for step in last_epoch) / len(last_epoch),
        "train_accuracy": sum(step["train_accuracy"] for step in last_epoch) / len(last_epoch),
        "pairwise_accuracy": quality["pairwise_accuracy"] or 0.0,
        "reward_margin": quality["reward_margin"] or 0.0,
        "num_steps": plan.num_steps,
    }


def _paired_batch(model: Any, pairs: Sequence[Mapping[str, Any]], device: str) -> Batch:
    """The chosen responses, then the rejected ones, in one batch."""
    prompts = [pair["prompt_ids"] for pair in pairs]
    responses = [pair[side] for side in ("chosen_ids", "rejected_ids") for pair in pairs]
    return collate(prompts + prompts, responses, pad_id(model), device)


def _scores_along(model: Any, batch: Batch) -> torch.Tensor:
    """[B, T] the score at each response token; past a response's end, that of its last token."""
    at = torch.minimum(batch.before + 1, batch.last[:, None])
    return token_scores(model, batch).gather(1, at)


@torch.no_grad()
def _all_pair_rewards(
    model: Any, pairs: Sequence[Mapping[str, Any]], ctx: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] rewards of the chosen and of the rejected responses."""
    parts = []
    for start in range(0, len(pairs), ctx.micro_batch):
        batch = _paired_batch(model, pairs[start : start + ctx.micro_batch], ctx.device)
        parts.append(sequence_rewards(model, batch).chunk(2))
    chosen, rejected = (torch.cat(side).cpu() for side in zip(*parts, strict=True))
    return chosen, rejected
