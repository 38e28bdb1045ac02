"""score: rewards for the rollouts, then the reference policy's log-probs of them.

The reward model is let go before the reference is loaded: one model in memory at a time.
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
from stages.engines.inference import over_responses
from stages.engines.models import load_policy, response_logprobs
from stages.rewards.source import rewards_of

SHOWN = 16


def run(
    config: ScoreConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    rollouts = read_parquet(inputs["rollouts"])
    rewards = rewards_of(ctx, config.reward, inputs["reward"], rollouts, finished=(0, 2))
    rewards = [
        reward - config.score.missing_eos_penalty * (row["finish_reason"] == "length")
        for reward, row in zip(rewards, rollouts, strict=True)
    ]
    reference = load_policy(inputs["reference"], ctx.device)
    ref_logprobs = over_responses(
        ctx,
        reference,
        rollouts,
        lambda batch: response_logprobs(reference, batch, config.temperature).logprobs,
        finished=(1, 2),
    )
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
