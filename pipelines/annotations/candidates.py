"""Pairs that could be asked about: two responses to one prompt, of rollouts or of two policies.

Only whole responses of one turn are compared: one that was cut off has no end to judge, and nothing
learns from a transcript. What is left out is counted, with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any

from pipelines.annotations.asked import Asked, asked
from pipelines.annotations.judgement import Origin, Response
from pipelines.annotations.pair import Pair, identified
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.lineage.content import Content
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.target import Resolver
from pipelines.results.sides import find_sides, read_answers

REWARD = "reward"
"""What a policy learns from, beside what each source said."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_COLUMNS = (
    *("prompt_id", "step", "sample_index", "greedy", "prompt", "response", "answer", "seed"),
    *("finish_reason", "loss_mask", "policy_hash"),
)
_POLICIES = "artifacts/policies"
_Place = tuple[Any, int, int]


@dataclass
class Candidates:
    """Pairs, in an order that means nothing, and what was left out."""

    pairs: list[Pair] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """What of the records could not be read."""


@dataclass(frozen=True)
class _Answered:
    """One response, before it has a partner."""

    prompt_id: str
    prompt: str
    answer: str | None
    response: Response


def of_rollouts(repository: Repository, iterations: Sequence[str]) -> Candidates:
    """Every two different responses to one prompt of an iteration."""
    run_index = gather(repository)
    candidates = Candidates(notes=run_index.notes)
    for iteration in iterations:
        answers = _rollouts(repository, run_index, iteration, candidates.left_out)
        _pair_up(repository, candidates, answers, iteration=iteration)
    return candidates


def of_policies(repository: Repository, policies: Sequence[str]) -> Candidates:
    """The likeliest answers of two policies to the held-out prompts."""
    run_index = gather(repository)
    candidates = Candidates(notes=run_index.notes)
    content = Content(repository, run_index)
    answers = []
    for side in find_sides(repository.root, run_index, policies):
        stage_run = side.evaluation(side.policy)
        assert stage_run is not None  # `find_sides` has looked for it
        evaluation = stage_run.required("evaluation", among_inputs=False)
        digest = stage_run.inputs[f"{_POLICIES}/{side.policy}/model"]
        for item in read_answers(content, evaluation):
            said = item.greedy
            if _is_whole(said.finish_reason, candidates.left_out):
                response = Response(
                    text=said.response,
                    policy=side.policy,
                    policy_hash=digest,
                    finish_reason=said.finish_reason,
                    rewards={REWARD: said.reward},
                )
                answers.append(_Answered(item.prompt_id, item.prompt, item.answer, response))
    _pair_up(repository, candidates, answers, iteration=None)
    return candidates


def _rollouts(
    repository: Repository, run_index: RunIndex, iteration: str, left_out: Counter[str]
) -> list[_Answered]:
    resolver, content = Resolver(run_index, repository.root), Content(repository, run_index)
    _, name = resolver.revision(iteration)
    prefix = iteration.removesuffix(name)
    target = resolver.find(f"{prefix}rollouts@{name}")
    if target.stage_run is None or target.artifact is None:
        raise LockstepError(f"{iteration}: no stage is known that has sampled its rollouts")
    stage_run, rollouts = target.stage_run, target.artifact
    rewards = _rewards(resolver, content, f"{prefix}scores@{name}", rollouts.hash)
    sampling = {
        key: stage_run.params[f"rollout.{key}"]
        for key in _SAMPLING
        if f"rollout.{key}" in stage_run.params
    }
    answers = []
    for row in content.rows(rollouts, _COLUMNS):
        if row["greedy"]:
            left_out["greedy"] += 1
        elif row["loss_mask"] is not None:
            left_out["of several turns"] += 1
        elif _is_whole(row["finish_reason"], left_out):
            name_of_it, digest = _policy(stage_run, row)
            response = Response(
                text=row["response"],
                policy=name_of_it,
                policy_hash=digest,
                seed=row["seed"],
                sampling=sampling,
                sample_index=row["sample_index"],
                step=row.get("step"),
                finish_reason=row["finish_reason"],
                rewards=rewards.get(_place(row), {}),
            )
            # Each step of an online run has its own policy: answers of two are two groups.
            answers.append(_Answered(row["prompt_id"], row["prompt"], row["answer"], response))
    return answers


def _is_whole(finish_reason: str, left_out: Counter[str]) -> bool:
    if finish_reason == "stop":
        return True
    left_out["cut off" if finish_reason == "length" else finish_reason] += 1
    return False


def _policy(stage_run: StageRun, row: Mapping[str, Any]) -> tuple[str, str]:
    """Name and hash of the policy that sampled a row; within an online run it has no folder."""
    if stage_run.name == "online":
        return f"{stage_run.key} step {row.get('step')}", row["policy_hash"]
    model = stage_run.required("policy", among_inputs=True)
    return PurePosixPath(model.path).parent.name, model.hash


def _rewards(
    resolver: Resolver, content: Content, name: str, rollouts_hash: str
) -> dict[_Place, dict[str, float]]:
    """What was recorded of each response; nothing where these rollouts were not scored."""
    try:
        target = resolver.find(name)
    except LockstepError:
        return {}
    stage_run = target.stage_run
    if stage_run is None or target.artifact is None:
        return {}
    if stage_run.required("rollouts", among_inputs=stage_run.name == "score").hash != rollouts_hash:
        return {}
    columns = ("prompt_id", "step", "sample_index", "reward", "by_source")
    return {
        _place(row): {REWARD: row["reward"], **dict(row["by_source"] or [])}
        for row in content.rows(target.artifact, columns)
    }


def _place(row: Mapping[str, Any]) -> _Place:
    return (row["prompt_id"], row.get("step") or 0, row["sample_index"])


def _pair_up(
    repository: Repository,
    candidates: Candidates,
    answers: Iterable[_Answered],
    *,
    iteration: str | None,
) -> None:
    """Add every two different answers to the same prompt, each two texts once."""
    groups: dict[tuple[str, int], list[_Answered]] = defaultdict(list)
    for answer in answers:
        groups[answer.prompt_id, answer.response.step or 0].append(answer)
    prompts = {prompt_id: group[0].prompt for (prompt_id, _), group in groups.items()}
    found = asked(repository.root, prompts)
    for (prompt_id, _), group in sorted(groups.items()):
        different = {answer.response.text: answer for answer in reversed(group)}
        if prompt_id not in found:
            candidates.left_out["of a prompt that the data no longer have"] += len(group)
        elif len(different) < 2:
            candidates.left_out["the same as the prompt's others"] += len(group)
        else:
            texts = [different[text] for text in sorted(different)]
            candidates.pairs += [
                _pair(one, other, found[prompt_id], iteration)
                for one, other in combinations(texts, 2)
            ]


def _pair(one: _Answered, other: _Answered, what: Asked, iteration: str | None) -> Pair:
    messages, tools = what
    return identified(
        Pair(
            messages=messages,
            tools=tools,
            one=one.response,
            other=other.response,
            answer=one.answer,
            origin=Origin(
                place="queue",
                iteration=iteration,
                prompt_id=one.prompt_id,
                held_out=iteration is None,
            ),
        )
    )
