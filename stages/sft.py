"""sft: supervised fine-tuning of the base model on the demonstrations.

The loss is the mean negative log-likelihood of completion tokens (the end-of-sequence token among
them) over the whole optimizer step; prompt tokens are masked.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from stages.context import Context
from stages.contracts.sft import SftConfig
from stages.data.artifacts import read_parquet, write_json
from stages.data.batching import collate
from stages.engines.models import load_policy, pad_id, response_logprobs, save_model
from stages.engines.optimizer import Learner
from stages.engines.ranks import join
from stages.engines.training import Micro, Plan, Rows, train, warmup_then_cosine


def run(
    config: SftConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.sft
    rows = read_parquet(inputs["demonstrations"])
    prompts = [row["prompt_ids"] for row in rows]
    completions = [row["completion_ids"] for row in rows]
    plan = Plan(
        num_rows=len(rows),
        batch_size=params.batch_size,
        epochs=params.epochs,
        seed=ctx.seed,
        learning_rate=warmup_then_cosine(params.warmup_ratio),
    )
    with join(ctx) as ranks:
        model = load_policy(inputs["base"], ctx.device)

        def micro_loss(chosen: Rows, step_rows: Rows) -> Micro:
            num_tokens = sum(len(completions[i]) for i in step_rows)
            batch = collate(
                [prompts[i] for i in chosen],
                [completions[i] for i in chosen],
                pad_id(model),
                ctx.device,
            )
            result = response_logprobs(model, batch, temperature=1.0)
            entropy = result.entropies.detach().sum() / num_tokens
            return Micro(-result.logprobs.sum() / num_tokens, {"entropy": entropy})

        learner = Learner(
            model,
            learning_rate=params.learning_rate,
            max_grad_norm=params.max_grad_norm,
            weight_decay=params.weight_decay,
        )
        shown = ["loss", "grad_norm"]
        history = train(ctx, {"policy": learner}, plan, micro_loss, shown=shown, ranks=ranks)

    save_model(model, out["model"], tokenizer_from=inputs["base"])
    # RL starts with no moments and no critic; an iteration leaves both here for the next.
    out["state"].mkdir()
    write_json(out["state"] / "state.json", {"steps": 0})
    last_epoch = history[-plan.steps_per_epoch :]
    loss = sum(step["loss"] for step in last_epoch) / len(last_epoch)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "entropy": sum(step["entropy"] for step in last_epoch) / len(last_epoch),
        "grad_norm": sum(step["grad_norm"] for step in last_epoch) / len(last_epoch),
        "num_steps": plan.num_steps,
        "num_tokens": params.epochs * sum(map(len, completions)),
    }
