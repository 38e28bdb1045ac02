"""score: rewards for the rollouts, then the reference policy's log-probs of them.

The reward model is let go before the reference is loaded: one model in memory at a time. Shards
share out the rows of both passes; the last to be done writes the scores.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from stages.algorithms.kl import k3
from stages.context import Context
from stages.contracts.score import ScoreConfig
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.engines.inference import response_pass
from stages.engines.models import load_policy, response_logprobs
from stages.engines.parts import collect, fill
from stages.rewards.source import reward_pass

SHOWN = 16


def run(
    config: ScoreConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    rollouts = read_parquet(inputs["rollouts"])
    rewarding = reward_pass(ctx, "rewards", config.reward, inputs["reward"], rollouts)
    referring = response_pass(
        ctx,
        "reference",
        rollouts,
        lambda: load_policy(inputs["reference"], ctx.device),
        lambda policy, batch: response_logprobs(policy, batch, config.temperature).logprobs,
    )
    fill(ctx, rewarding, referring)
    rewards = [
        reward - config.score.missing_eos_penalty * (row["finish_reason"] == "length")
        for reward, row in zip(collect(ctx, rewarding), rollouts, strict=True)
    ]
    ref_logprobs = collect(ctx, referring)
    scores = [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "reward": reward,
            "ref_logprobs": logprobs,
        }
        for row, reward, logprobs in zip(rollouts, rewards, ref_logprobs, strict=True)
    ]
    write_parquet(out["scores"], scores, schema.SCORES)
    samples = [
        {"prompt": row["prompt"], "response": row["response"], "reward": reward}
        for row, reward in zip(rollouts, rewards, strict=True)
    ]
    ctx.table("samples", samples[:: max(1, len(samples) // SHOWN)][:SHOWN])
    sampled = torch.tensor([x for row in rollouts for x in row["logprobs"]])
    reference_of = torch.tensor([x for row in ref_logprobs for x in row])
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "kl_to_reference": float(k3(sampled, reference_of).mean()),
    }
