"""rollout: responses sampled from the current policy, with the log-probs they were sampled at.

Which prompts an iteration draws is a hash of (seed, iteration, prompt id); what a sample's random
numbers are is a hash of (seed, iteration, prompt id, sample index). Rows are sorted by (prompt id,
sample index).

Shards share out the batches that are decoded together; the last to be done writes the rows. Ranks,
where the policy needs more GPUs than a node has, share them as groups, and rank 0 writes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from stages.context import Context, StageError
from stages.contracts.episodes import FailedEpisode
from stages.contracts.rollout import RolloutConfig
from stages.data.artifacts import read_role, write_parquet
from stages.data.finite import sample_name
from stages.data.schema import PromptRow, RolloutRow, ToolAnswerRow
from stages.data.seeds import draw_order
from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Completion, Generator, Request, Sampling
from stages.engines.generation.generators import opened
from stages.engines.generation.sampling import SamplingTask, generate_all, sample_seed
from stages.engines.processes.ranks import join
from stages.environments.episodes import (
    Arena,
    longest_sequence,
    of_episodes,
    open_arena,
    played,
    tell_failures,
)
from stages.environments.record import Record, recorded, tell_times


def run(
    config: RolloutConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    prompts = read_role(inputs["prompts"], PromptRow, config.rollout.source, "rollout")
    playing = (config.rollout, config.episodes, inputs["environments"], inputs["policy"])
    record = Record(config.rollout.tools, inputs["tool_record"])
    with open_arena(*playing, ctx.seed, record) as arena, join(ctx):
        longest = longest_sequence(prompts, config.rollout.max_new_tokens, arena)
        how = (config.rollout.engine, config.precision, config.rollout.batch_size, longest)
        generator = partial(opened, ctx, inputs["policy"], *how)
        decoder = Decoder(inputs["policy"])
        rows, answers, metrics = roll_out(config, prompts, decoder, generator, ctx, arena)
    write_parquet(out["rollouts"], rows, RolloutRow)
    write_parquet(out["tool_answers"], answers, ToolAnswerRow)
    return metrics


def roll_out(
    config: RolloutConfig,
    data: Sequence[PromptRow],
    decoder: Decoder,
    generator: Callable[[], AbstractContextManager[Generator]],
    ctx: Context,
    arena: Arena | None = None,
) -> tuple[list[RolloutRow], list[ToolAnswerRow], dict[str, float | int]]:
    """Rollouts for the iteration that `ctx` is bound to, what its environment answered, and their
    metrics."""
    params = config.rollout
    iteration = str(ctx.key)
    prompts = {row["prompt_id"]: row for row in data}
    wanted = params.prompts + params.reserve
    if len(prompts) < wanted:
        raise StageError(
            f"rollout.prompts is {params.prompts} and rollout.reserve {params.reserve}, but there "
            f"are {len(prompts)} different {params.source}: lower them or add prompts"
        )
    drawn = sorted(draw_order(prompts, ctx.seed, iteration)[:wanted])
    # A greedy response is one more sample, the last of its prompt, and needs no seed.
    indices = range(params.samples + params.greedy_baseline)
    slots = [(prompts[name], index) for name in drawn for index in indices]
    seeds = [
        sample_seed(ctx.seed, iteration, row["prompt_id"], index)
        if index < params.samples
        else None
        for row, index in slots
    ]

    named = [{**row, "sample_index": index, "iteration": iteration} for row, index in slots]
    sampled = generate_all(
        ctx,
        generator,
        SamplingTask(
            [Request(row["prompt_ids"], seed) for (row, _), seed in zip(slots, seeds, strict=True)],
            max_new_tokens=params.max_new_tokens,
            sampling=Sampling(params.temperature, params.top_p, params.top_k, params.min_p),
            slots=params.batch_size,
            describe=lambda i: sample_name(named[i]),
            play=played(arena, named) if arena else None,
        ),
    )
    told: dict[str, float] = {}
    if arena:
        told |= tell_failures(ctx, sampled.completions)
        tell_times(ctx, named, sampled.completions)
    # Those of dropped episodes, too: a replay has to drop the same.
    answers = recorded(params.tools, named, sampled.completions)
    kept = _without_dropped(config, [row for row, _ in slots], sampled.completions)
    if arena:
        told["episodes_dropped"] = len(slots) - len(kept)
    slots, seeds = [slots[i] for i in kept], [seeds[i] for i in kept]
    completions = [sampled.completions[i] for i in kept]
    texts = decoder.texts([completion.ids for completion in completions])

    rows: list[RolloutRow] = [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "answer": row["answer"],
            "extra": row["extra"],
            "prompt_ids": row["prompt_ids"],
            "sample_index": index,
            "greedy": seed is None,
            "response": response,
            "response_ids": completion.ids,
            "logprobs": completion.logprobs,
            "support": completion.support,
            "loss_mask": completion.loss_mask,
            "seed": seed or 0,
            "finish_reason": completion.finish_reason,
            "environment_reward": completion.environment_reward,
            "policy_hash": sampled.policy_hash,
        }
        for (row, index), seed, completion, response in zip(
            slots, seeds, completions, texts, strict=True
        )
    ]
    if arena:
        for rollout, completion in zip(rows, completions, strict=True):
            _keep_turns(rollout, completion)
    drawn_at_random = [c for c, seed in zip(completions, seeds, strict=True) if seed is not None]
    num_tokens = sum(completion.num_sampled for completion in drawn_at_random)
    num_cut = sum(completion.finish_reason == "length" for completion in drawn_at_random)
    return (
        rows,
        answers,
        {
            "response_length": num_tokens / len(drawn_at_random),
            "truncation_rate": num_cut / len(drawn_at_random),
            "entropy": sum(completion.entropy for completion in drawn_at_random) / num_tokens,
            "num_sequences": len(drawn_at_random),
            "num_tokens": num_tokens,
            **(of_episodes(drawn_at_random) if arena else {}),
            **told,
        },
    )


def _keep_turns(row: RolloutRow, completion: Completion) -> None:
    """What a row has only where there was an environment."""
    row["turn_ends"] = completion.turn_ends or []
    row["turn_rewards"] = completion.turn_rewards or []
    if completion.segment_starts is not None:
        row["segment_starts"] = completion.segment_starts
        row["segment_histories"] = completion.segment_histories or []


def _without_dropped(
    config: RolloutConfig, rows: Sequence[PromptRow], completions: Sequence[Completion]
) -> list[int]:
    """What is left where failed episodes are dropped: samples of one prompt are compared, so all of
    a prompt or none."""
    failures = {
        row["prompt_id"]: completion.failure
        for row, completion in zip(rows, completions, strict=True)
        if completion.failure is not None and config.episodes.failed is FailedEpisode.DROP
    }
    kept = [index for index, row in enumerate(rows) if row["prompt_id"] not in failures]
    if not kept:
        raise StageError(
            "an episode of every prompt failed, so that episodes.failed: drop leaves nothing to "
            f"learn from; the first: {next(iter(failures.values()))}"
        )
    return kept
