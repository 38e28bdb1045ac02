"""evaluate: a policy on the held-out prompts.

Each prompt is answered once greedily and a few times sampled. Whether an answer is right is the
verifier's to say, whatever the reward that was trained on. Models are held one at a time: the
policy generates, the reference rates what was sampled, the reward model scores.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.algorithms.kl import reported_kl
from stages.context import Context
from stages.contracts.evaluate import EvaluateConfig
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.finite import sample_name
from stages.data.tokenizer import Decoder
from stages.engines.forward.inference import response_pass
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.generators import opened
from stages.engines.generation.sampling import generate_all, sample_seed
from stages.engines.models.folders import load_policy
from stages.engines.processes.parts import collect, fill
from stages.rewards.source import reward_pass
from stages.rewards.verifier import Verifier

SHOWN = 16


def run(
    config: EvaluateConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    prompts = read_parquet(inputs["held_out"])
    asked = [(row, index) for row in prompts for index in range(config.evaluate.samples)]
    # A greedy answer has no number.
    rows = [*prompts, *({**row, "sample_index": index} for row, index in asked)]
    # The samples of every policy share their seeds, so that policies are compared like with like.
    requests = [Request(row["prompt_ids"]) for row in prompts] + [
        Request(row["prompt_ids"], sample_seed(ctx.seed, "evaluate", row["prompt_id"], index))
        for row, index in asked
    ]
    answers = generate_all(
        ctx,
        lambda: opened(ctx, inputs["policy"], config.engine, config.precision, config.batch_size),
        requests,
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(config.temperature),
        slots=config.batch_size,
        describe=lambda i: sample_name(rows[i]),
    )
    completions = answers.completions
    decoder = Decoder(inputs["policy"])
    greedy = _answered(prompts, completions[: len(prompts)], decoder)
    sampled = _answered(rows[len(prompts) :], completions[len(prompts) :], decoder)

    referring = response_pass(
        ctx,
        f"reference-of-{answers.policy_hash}",
        sampled,
        lambda: load_policy(inputs["reference"], ctx.device, config.precision),
        lambda policy, batch: response_logprobs(policy, batch, config.temperature).logprobs,
        "the reference's log-prob",
    )
    rewarding = reward_pass(
        ctx,
        f"rewards-of-{answers.policy_hash}",
        config.reward,
        inputs["reward"],
        config.precision,
        [*greedy, *sampled],
    )
    fill(ctx, referring, rewarding)
    ref_logprobs, rewards = collect(ctx, referring), collect(ctx, rewarding)
    verifier = Verifier.load(inputs["verifier"])
    correct = [
        verifier.reward(row["response"], row["answer"], ended=row["finish_reason"] == "stop")
        for row in (*greedy, *sampled)
    ]

    table = [
        {**row, "correct": bool(right), "reward": reward}
        for row, right, reward in zip(greedy, correct, rewards, strict=False)
    ]
    out["evaluation"].mkdir()
    columns = schema.EVALUATION.names
    write_parquet(
        out["evaluation"] / "samples.parquet",
        [{name: row[name] for name in columns} for row in table],
        schema.EVALUATION,
    )
    shown = ("prompt", "response", "reward")
    ctx.table("samples", [{name: row[name] for name in shown} for row in table[:SHOWN]])

    of_samples = completions[len(prompts) :]
    num_tokens = sum(len(completion.ids) for completion in of_samples)
    own = torch.tensor([x for completion in of_samples for x in completion.logprobs])
    reference = torch.tensor([x for row in ref_logprobs for x in row])
    return {
        "accuracy": statistics.fmean(correct[: len(prompts)]),
        "accuracy_sampled": statistics.fmean(correct[len(prompts) :]),
        "reward_mean": statistics.fmean(rewards[len(prompts) :]),
        "reward_std": statistics.pstdev(rewards[len(prompts) :]),
        "kl_to_reference": float(reported_kl(own, reference).mean()),
        "entropy": sum(completion.entropy for completion in of_samples) / num_tokens,
        "response_length": num_tokens / len(of_samples),
        "truncation_rate": statistics.fmean(c.finish_reason == "length" for c in of_samples),
        "num_prompts": len(prompts),
    }


def _answered(
    prompts: Sequence[Mapping[str, Any]], completions: Sequence[Completion], decoder: Decoder
) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "response": decoder.text(completion.ids),
            "response_ids": completion.ids,
            "finish_reason": completion.finish_reason,
        }
        for row, completion in zip(prompts, completions, strict=True)
    ]
