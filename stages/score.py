"""score: rewards for the rollouts, then the reference policy's log-probs of them.

Each source's reward is computed as it is and kept; what is learnt from is their weighted sum,
clipped, with penalties for responses that did not end or nearly did not, and whitened if asked for.
With `rl.turn_credit: turn` it is also shared out over an episode's turns (rewards/by_turn.py).

One model is in memory at a time: the reward model is let go before the reference is loaded. Rules,
functions and servers work beside them. Shards share out the rows of all passes; the last to be done
writes the scores. Where a model does not fit a GPU, the processes are joined instead, and each
model is spread over them (engines/models/readers.py): the bytes are the same.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stages.algorithms.kl import mean_kl, reported_kl
from stages.algorithms.loss import Tokens
from stages.algorithms.shaping import (
    clip_rewards,
    combine,
    missing_eos,
    overlong_penalty,
    whiten_rewards,
)
from stages.context import Context
from stages.contracts.rl import Reward, TurnCredit
from stages.contracts.score import ScoreConfig
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.batching import loss_mask, loss_masks_of, pad
from stages.data.finite import check_finite, sample_name
from stages.data.schema import RolloutRow, ScoreRow, as_kept
from stages.engines.forward.inference import logprobs_by, response_pass
from stages.engines.models.loaders import FRESH, Loaders, fresh
from stages.engines.processes.beside import Beside
from stages.engines.processes.parts import collect, fill
from stages.engines.processes.ranks import join
from stages.rewards.by_turn import environment_weight, reward_by_turn
from stages.rewards.isolated import Workers
from stages.rewards.named import FRESH_WORKERS, NamedSource
from stages.rewards.source import BuiltIn, Source, computes_elsewhere, rewards_from
from stages.standard_error import error_metric, standard_error

SHOWN = 16


def run(
    config: ScoreConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    rollouts = read_parquet(inputs["rollouts"], RolloutRow)
    with join(ctx):
        scores, metrics = score(config, inputs, rollouts, ctx, fresh(ctx))
    write_parquet(out["scores"], scores, ScoreRow)
    return metrics


def score(
    config: ScoreConfig,
    inputs: Mapping[str, Path],
    rollouts: Sequence[RolloutRow],
    ctx: Context,
    load: Loaders = FRESH,
    workers: Workers = FRESH_WORKERS,
) -> tuple[list[ScoreRow], dict[str, float | int]]:
    """The scores of the rollouts, row by row, and their metrics."""
    weights = config.score.weights or {config.reward: 1.0}
    sources = {name: _source(config, inputs, name) for name in weights}
    aside = [name for name, source in sources.items() if computes_elsewhere(source)]
    beside = Beside(ctx)
    rewarding = {
        name: rewards_from(
            source,
            beside.ctx if name in aside else ctx,
            f"rewards-{name}",
            rollouts,
            config.precision,
            load,
            workers,
        )
        for name, source in sources.items()
    }
    reference = lambda: load.policy(inputs["reference"], ctx.device, config.precision)  # noqa: E731
    of_reference = logprobs_by("reference", reference, config.temperature)
    referring = response_pass(ctx, "reference", rollouts, of_reference)
    wanted = [referring] if config.score.reference else []
    here = [work for name, work in rewarding.items() if name not in aside]
    with beside.fill(*(rewarding[name] for name in aside)):
        fill(ctx, *here, *wanted)
    by_source = {name: collect(ctx, work) for name, work in rewarding.items()}
    ref_logprobs = collect(ctx, referring) if wanted else [None] * len(rollouts)
    shaped = _shaped(
        {name: torch.tensor(values, dtype=torch.float64) for name, values in by_source.items()},
        weights,
        rollouts,
        config,
    )
    # As they are kept, so that who reads them here or from the file reads the same.
    rewards = shaped.float().tolist()
    for row, reward in zip(rollouts, rewards, strict=True):
        check_finite("the reward to learn from", sample_name(row), reward)

    of_rows = [
        list(zip(by_source, values, strict=True))
        for values in zip(*by_source.values(), strict=True)
    ]
    scores: list[ScoreRow] = [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "reward": reward,
            "by_source": of_row,
            "ref_logprobs": logprobs,
        }
        for row, reward, of_row, logprobs in zip(
            rollouts, rewards, of_rows, ref_logprobs, strict=True
        )
    ]
    if config.turn_credit is TurnCredit.TURN:
        weight = environment_weight(weights, config.rewards)
        for of_row, shares in zip(scores, reward_by_turn(rollouts, shaped, weight), strict=True):
            of_row["reward_by_turn"] = as_kept(shares)
            for share in of_row["reward_by_turn"]:
                check_finite("a turn's reward to learn from", sample_name(of_row), share)
    samples = [
        {"prompt": row["prompt"], "response": row["response"], "reward": reward}
        for row, reward in zip(rollouts, shaped.tolist(), strict=True)
    ]
    ctx.table("samples", samples[:: max(1, len(samples) // SHOWN)][:SHOWN])
    return scores, _summary(rollouts, shaped.tolist(), by_source, ref_logprobs)


def _source(config: ScoreConfig, inputs: Mapping[str, Path], name: str) -> Source:
    """One of `score.weights`. A named one need not be `rl.reward`, so it may have no artifact."""
    if name in config.rewards:
        return NamedSource(name, config.rewards[name], inputs["functions"])
    return BuiltIn(name, inputs["verifier" if name == Reward.VERIFIER else "reward"])


def _shaped(
    by_source: Mapping[str, Tensor],
    weights: Mapping[str, float],
    rollouts: Sequence[RolloutRow],
    config: ScoreConfig,
) -> Tensor:
    """[N] the rewards to learn from."""
    params = config.score
    rewards = combine(by_source, weights)
    if params.clip is not None:
        rewards = clip_rewards(rewards, params.clip)
    ended = torch.tensor([row["finish_reason"] != "length" for row in rollouts])
    lengths = torch.tensor([float(sum(loss_mask(row))) for row in rollouts])
    rewards = rewards + missing_eos(ended, params.missing_eos_penalty)
    rewards = rewards + overlong_penalty(
        lengths,
        max_length=config.max_new_tokens,
        buffer=params.overlong_buffer,
        penalty=params.overlong_penalty,
    )
    sampled = torch.tensor([not row["greedy"] for row in rollouts])
    return whiten_rewards(rewards, sampled) if params.whiten else rewards


def _summary(
    rollouts: Sequence[RolloutRow],
    rewards: Sequence[float],
    by_source: Mapping[str, Sequence[float]],
    ref_logprobs: Sequence[Sequence[float] | None],
) -> dict[str, float | int]:
    """Of the sampled responses; a greedy one is only compared with."""
    drawn = [i for i, row in enumerate(rollouts) if not row["greedy"]]
    prompts = [rollouts[i]["prompt_id"] for i in drawn]
    summary = _spread("", [rewards[i] for i in drawn], prompts)
    known = [i for i in drawn if ref_logprobs[i] is not None]
    if known:
        sampled = pad([rollouts[i]["logprobs"] for i in known], 0.0, torch.float64)
        reference_of = pad([ref_logprobs[i] or () for i in known], 0.0, torch.float64)
        tokens = Tokens.padded(loss_masks_of([rollouts[i] for i in known]))
        of_known = [rollouts[i]["prompt_id"] for i in known]
        kl, error = mean_kl(reported_kl(sampled, reference_of), tokens, of_known)
        summary |= {"kl_to_reference": kl, **error_metric("kl_to_reference", error)}
    for name, values in by_source.items():
        summary |= _spread(f"/{name}", [values[i] for i in drawn], prompts)
    return summary


def _spread(
    source: str, rewards: Sequence[float], prompts: Sequence[str]
) -> dict[str, float | int]:
    return {
        f"reward_mean{source}": statistics.fmean(rewards),
        **error_metric(f"reward_mean{source}", standard_error(rewards, prompts)),
        f"reward_std{source}": statistics.pstdev(rewards),
    }
