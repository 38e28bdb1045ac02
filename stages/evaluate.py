"""evaluate: a policy on the held-out prompts.

Each prompt is answered once greedily and a few times sampled. What is right is for one source of
rewards to say, the verifier by default, whatever the reward that was trained on; where it needs an
answer that the data do not have, only rewards are left to compare. Models are held one at a time:
the policy generates, the reference rates what was sampled, the reward model scores. The reference's
own responses come from its evaluation, so they are generated and scored once for all that are
compared with them.

Of processes that are joined as ranks, each generates its share of the responses; the models that
rate these are spread over them (engines/models/readers.py). The bytes are those of one process.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NotRequired

import torch

from stages.algorithms.kl import mean_kl, reported_kl
from stages.algorithms.loss import Tokens
from stages.context import Context, StageError
from stages.contracts.evaluate import EvaluateConfig
from stages.contracts.rl import Reward
from stages.data.artifacts import read_role, write_parquet
from stages.data.batching import loss_mask, loss_masks_of, pad
from stages.data.finite import sample_name
from stages.data.schema import PromptRow, ToolAnswerRow
from stages.data.tokenizer import Decoder
from stages.engines.forward.inference import logprobs_by, response_pass
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.generators import opened
from stages.engines.generation.sampling import Samples, SamplingTask, generate_all, sample_seed
from stages.engines.models.loaders import fresh
from stages.engines.processes.parts import collect, fill
from stages.engines.processes.ranks import join
from stages.environments.episodes import (
    longest_sequence,
    of_episodes,
    open_arena,
    played,
    tell_failures,
)
from stages.environments.record import Record, recorded, tell_times
from stages.environments.transcripts import transcripts
from stages.evaluation import folder, measures, tasks
from stages.evaluation.answers import Answer, Answered
from stages.evaluation.contest import Contest, contest
from stages.rewards.source import Source, load_source, needs_answer, rewards_from
from stages.rewards.verifier import Verifier
from stages.standard_error import error_metric, standard_error

SHOWN = 16
"""Rows of the table that a tracker shows beside those of other policies."""


class Asked(PromptRow):
    """A prompt to answer."""

    sample_index: int | None
    """None where it is answered greedily."""


class Response(Asked):
    """A prompt and the answer, as rewards read it."""

    response: str
    response_ids: Sequence[int]
    support: Sequence[Sequence[int]] | None
    loss_mask: Sequence[int] | None
    finish_reason: str
    environment_reward: float | None
    segment_starts: NotRequired[Sequence[int]]
    segment_histories: NotRequired[Sequence[Sequence[int]]]


def run(
    config: EvaluateConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    prompts = read_role(inputs["held_out"], PromptRow, "held_out", "evaluate")
    reward = load_source(config.reward, inputs["reward"])
    _check_answers(prompts, reward)
    indices = range(config.evaluate.samples)
    asked: list[Asked] = [{**row, "sample_index": None} for row in prompts]
    asked += [{**row, "sample_index": index} for row in prompts for index in indices]
    judge = load_source(config.evaluate.correct, inputs["judge"])
    with join(ctx):
        generated = _generated(config, inputs, prompts, asked, ctx)
        responses = _responses(asked, generated.completions, Decoder(inputs["policy"]))
        of_samples, sampled = generated.completions[len(prompts) :], responses[len(prompts) :]

        load = fresh(ctx)
        reference = lambda: load.policy(inputs["reference"], ctx.device, config.precision)  # noqa: E731
        of_reference = logprobs_by("reference", reference, config.temperature)
        policy = generated.policy_hash
        referring = response_pass(ctx, f"reference-of-{policy}", sampled, of_reference)
        rewarding = rewards_from(
            reward, ctx, f"rewards-of-{policy}", responses, config.precision, load
        )
        needs = needs_answer(judge)
        can_be_judged = [row["answer"] is not None or not needs for row in responses]
        # A source that is the reward, too, is asked once.
        judging = rewarding
        if judge.name != reward.name:
            judged = list(compress(responses, can_be_judged))
            judging = rewards_from(
                judge, ctx, f"correctness-of-{policy}", judged, config.precision, load
            )
        fill(ctx, referring, rewarding, *([judging] if judging is not rewarding else []))
        ref_logprobs, rewards = collect(ctx, referring), collect(ctx, rewarding)
        judgements = iter(collect(ctx, judging))
        correct = [
            next(judgements) >= config.evaluate.correct_at if judgeable else None
            for judgeable in can_be_judged
        ]

    verifier = Verifier.load(inputs["judge"]) if judge.name == Reward.VERIFIER else None
    failed: dict[str, float] = {}
    named = _named(asked, ctx)
    if config.environment:
        failed |= tell_failures(ctx, generated.completions)
        tell_times(ctx, named, generated.completions)
    shown = [row["response"] for row in responses]
    if config.environment:
        where = inputs["environments"], inputs["policy"]
        shown = transcripts(generated.completions, config.environment, *where)
    judgements_of = zip(responses, shown, rewards, correct, strict=True)
    answers = [_answer(*parts, verifier) for parts in judgements_of]
    answered = _by_prompt(prompts, answers, config.evaluate.samples)
    compared = _compare(answered, inputs.get("reference_evaluation"))
    by_task = tasks.breakdown(answered, compared)
    folder.write(out["evaluation"], answered, compared, by_task)
    told = recorded(config.tools, named, generated.completions)
    write_parquet(out["evaluation_answers"], told, ToolAnswerRow)
    ctx.table("samples", _shown(answered, compared))

    # What an environment said was not sampled, and does not count.
    num_tokens = sum(completion.num_sampled for completion in of_samples)
    own, by_reference = (
        pad(rows, 0.0, torch.float64)
        for rows in ([completion.logprobs for completion in of_samples], ref_logprobs)
    )
    tokens = Tokens.padded(loss_masks_of(sampled))
    prompt_ids = [row["prompt_id"] for row in sampled]
    kl, kl_error = mean_kl(reported_kl(own, by_reference), tokens, prompt_ids)
    of_sampled = rewards[len(prompts) :]
    return {
        **measures.quality(answered),
        **measures.by_chances(answered, config.evaluate.pass_at),
        **(measures.by_vote(answered) if verifier else {}),
        **(measures.against(answered, compared) if compared else {}),
        "reward_mean": statistics.fmean(of_sampled),
        **error_metric("reward_mean", standard_error(of_sampled, prompt_ids)),
        "reward_std": statistics.pstdev(of_sampled),
        "kl_to_reference": kl,
        **error_metric("kl_to_reference", kl_error),
        "entropy": sum(completion.entropy for completion in of_samples) / num_tokens,
        "response_length": num_tokens / len(of_samples),
        "truncation_rate": statistics.fmean(c.finish_reason == "length" for c in of_samples),
        "num_prompts": len(prompts),
        "num_judged": sum(item.is_judged for item in answered),
        **(of_episodes(of_samples) if config.environment else {}),
        **failed,
        **tasks.task_metrics(by_task, config.evaluate.task_metrics),
    }


def _generated(
    config: EvaluateConfig,
    inputs: Mapping[str, Path],
    prompts: Sequence[PromptRow],
    asked: Sequence[Asked],
    ctx: Context,
) -> Samples:
    playing = (config, config.episodes, inputs["environments"], inputs["policy"])
    record = Record(config.tools, inputs["tool_record"])
    with open_arena(*playing, ctx.seed, record) as arena:
        longest = longest_sequence(prompts, config.max_new_tokens, arena)
        how = (config.engine, config.precision, config.batch_size, longest)
        task = SamplingTask(
            [_request(row, ctx.seed) for row in asked],
            max_new_tokens=config.max_new_tokens,
            sampling=Sampling(config.temperature),
            slots=config.batch_size,
            describe=lambda i: sample_name(asked[i]),
            play=played(arena, _named(asked, ctx)) if arena else None,
        )
        return generate_all(ctx, lambda: opened(ctx, inputs["policy"], *how), task)


def _named(asked: Sequence[Asked], ctx: Context) -> list[dict[str, Any]]:
    """As the record of what an environment answers names them."""
    return [{**row, "iteration": f"evaluation of {ctx.key}"} for row in asked]


def _check_answers(prompts: Sequence[PromptRow], reward: Source) -> None:
    """StageError where the reward needs an answer that a prompt lacks, before any is generated."""
    lacking = [row["prompt"] for row in prompts if row["answer"] is None]
    if lacking and needs_answer(reward):
        raise StageError(
            f"the held-out prompt {lacking[0]!r} has no 'answer' ({len(lacking)} of {len(prompts)} "
            f"have none), and rl.reward ({reward.name}) compares with it: add it to their "
            "rows in the data, or hold out prompts that have one"
        )


def _request(row: Asked, seed: int) -> Request:
    """The samples of every policy share their seeds, so that like is compared with like."""
    index = row["sample_index"]
    if index is None:
        return Request(row["prompt_ids"])
    return Request(row["prompt_ids"], sample_seed(seed, "evaluate", row["prompt_id"], index))


def _responses(
    rows: Sequence[Asked], completions: Sequence[Completion], decoder: Decoder
) -> list[Response]:
    texts = decoder.texts([completion.ids for completion in completions])
    return [
        {
            **row,
            "response": response,
            "response_ids": completion.ids,
            "support": completion.support,
            "loss_mask": completion.loss_mask,
            "finish_reason": completion.finish_reason,
            "environment_reward": completion.environment_reward,
            "segment_starts": completion.segment_starts or [],
            "segment_histories": completion.segment_histories or [],
        }
        for row, completion, response in zip(rows, completions, texts, strict=True)
    ]


def _answer(
    row: Response, shown: str, reward: float, correct: bool | None, verifier: Verifier | None
) -> Answer:
    """Only the verifier knows what in a response is the answer, which a vote has to compare."""
    ended, length = row["finish_reason"] == "stop", sum(loss_mask(row))
    vote = verifier.given(row["response"]) if verifier and ended and correct is not None else None
    return Answer(shown, row["finish_reason"], length, reward, correct, vote)


def _by_prompt(
    prompts: Sequence[PromptRow], answers: Sequence[Answer], samples: int
) -> list[Answered]:
    """The greedy answers come first, one per prompt, then the samples of each prompt together."""
    sampled = answers[len(prompts) :]
    return [
        Answered(
            row["prompt_id"],
            row["prompt"],
            row["answer"],
            tasks.task_of(row),
            answers[index],
            tuple(sampled[index * samples : (index + 1) * samples]),
        )
        for index, row in enumerate(prompts)
    ]


def _compare(answered: Sequence[Answered], reference: Path | None) -> Contest | None:
    """With the reference's answers; not for the reference itself."""
    if reference is None:
        return None
    try:
        return contest(answered, folder.read(reference))
    except ValueError as error:
        raise StageError(
            f"{reference} cannot be compared with ({error}): run `dvc repro`, so that the "
            "reference is evaluated again"
        ) from error


def _shown(answered: Sequence[Answered], compared: Contest | None) -> list[dict[str, Any]]:
    """The first prompts, which are the same ones for every policy."""
    rows = folder.greedy_rows(answered[:SHOWN], compared)
    theirs = compared.theirs if compared else ()
    columns = ("prompt", "response", "reward", "correct", "task", "length", "pass_rate")
    return [
        {
            **{name: row[name] for name in columns},
            "reference_response": theirs[index].greedy.response if theirs else None,
            "reference_reward": row["reference_reward"],
            "won": row["won"],
        }
        for index, row in enumerate(rows)
    ]
