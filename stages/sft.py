"""sft: supervised fine-tuning of the base model on the demonstrations.

The loss is the mean negative log-likelihood of completion tokens (the end-of-sequence token among
them) over the whole optimizer step; prompt tokens are masked, and completion tokens where the
demonstration's `loss_mask` has 0 for them. With no epochs the policy is the base model as it is,
for runs that start from a model which follows instructions already.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stages.context import Context, ShareDone
from stages.contracts.sft import SftConfig
from stages.data.artifacts import read_role
from stages.data.batching import loss_mask
from stages.data.finite import row_name
from stages.data.schema import DemonstrationRow
from stages.engines.models.folders import load_policy
from stages.engines.models.lora import open_for_training
from stages.engines.models.unread import to_learn
from stages.engines.processes.ranks import join
from stages.engines.training.loop import cosine_plan, fresh_learner, last_epoch_means, train
from stages.engines.training.rl_state import start_state
from stages.engines.training.saving import save_learner
from stages.learning.imitation import imitation


def run(
    config: SftConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    if not config.sft.epochs:
        if ctx.rank:
            raise ShareDone("there is nothing to train; rank 0 writes")
        shutil.copytree(inputs["base"], out["model"])
        start_state(out["state"])
        return {"num_steps": 0, "num_tokens": 0}
    rows = read_role(inputs["demonstrations"], DemonstrationRow, "demonstrations", "sft")
    plan = cosine_plan(config.sft, len(rows), ctx.seed)
    with join(ctx) as ranks:
        model = open_for_training(
            to_learn(load_policy, ctx), inputs["base"], ctx.loads_on, config.lora, ctx.seed
        )
        work = imitation(
            model,
            [row["prompt_ids"] for row in rows],
            [row["completion_ids"] for row in rows],
            ctx.device,
            lambda i: row_name("demonstration", i, rows[i]),
            [row["loss_mask"] for row in rows],
        )
        learner = fresh_learner(ctx, ranks, model, config.sft, config.precision)
        shown = ["loss", "grad_norm"]
        work = replace(work, dropout=True)
        history = train(ctx, {"policy": learner}, plan, work, shown=shown, ranks=ranks)
        hashes = save_learner(
            learner, out["model"], tokenizer_from=inputs["base"], lora=config.lora, ranks=ranks
        )
        ctx.wrote_all(hashes)
    start_state(out["state"])
    means = last_epoch_means(history, plan)
    return {
        **means,
        "perplexity": math.exp(means["loss"]),
        "num_steps": plan.num_steps,
        "num_tokens": config.sft.epochs
        * sum(sum(loss_mask(row, "completion_ids")) for row in rows),
    }
