"""rollout: responses sampled from the current policy, with the log-probs they were sampled at.

Which prompts an iteration draws is a hash of (seed, iteration, prompt id); what a sample's random
numbers are is a hash of (seed, iteration, prompt id, sample index). Rows are sorted by (prompt id,
sample index).

Shards share out the batches that are decoded together; the last to be done writes the rows.
"""

from collections.abc import Mapping
from pathlib import Path

from stages.context import Context, StageError
from stages.contracts.rollout import RolloutConfig
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.seeds import stable_hash
from stages.data.tokenizer import Decoder
from stages.engines.generation import Request
from stages.engines.sampling import generate_all, sample_seed


def run(
    config: RolloutConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.rollout
    iteration = str(ctx.key)
    prompts = read_parquet(inputs["prompts"])
    if len(prompts) < params.prompts:
        raise StageError(
            f"rollout.prompts is {params.prompts}, but prompts.jsonl has {len(prompts)} different "
            "prompts: lower rollout.prompts or add prompts"
        )
    prompts.sort(key=lambda row: stable_hash(ctx.seed, iteration, row["prompt_id"]))
    drawn = sorted(prompts[: params.prompts], key=lambda row: str(row["prompt_id"]))
    slots = [(row, index) for row in drawn for index in range(params.samples)]
    seeds = [sample_seed(ctx.seed, iteration, row["prompt_id"], index) for row, index in slots]

    sampled = generate_all(
        ctx,
        inputs["policy"],
        [Request(row["prompt_ids"], seed) for (row, _), seed in zip(slots, seeds, strict=True)],
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        batch_size=params.batch_size,
    )
    completions = sampled.completions

    decoder = Decoder(inputs["policy"])
    rows = [
        {
            **{name: row[name] for name in ("prompt_id", "prompt", "answer", "prompt_ids")},
            "sample_index": index,
            "response": decoder.text(completion.ids),
            "response_ids": completion.ids,
            "logprobs": completion.logprobs,
            "seed": seed,
            "finish_reason": completion.finish_reason,
            "policy_hash": sampled.policy_hash,
        }
        for (row, index), seed, completion in zip(slots, seeds, completions, strict=True)
    ]
    write_parquet(out["rollouts"], rows, schema.ROLLOUTS)
    num_tokens = sum(len(completion.ids) for completion in completions)
    return {
        "response_length": num_tokens / len(rows),
        "truncation_rate": sum(c.finish_reason == "length" for c in completions) / len(rows),
        "entropy": sum(completion.entropy for completion in completions) / num_tokens,
        "num_sequences": len(rows),
        "num_tokens": num_tokens,
    }
