"""Held-out answers of several policies side by side, prompt by prompt.

The first policy is the one that the others are compared with; filters of right, wrong, reward and
length are about the last. Only prompts that all of them answered have a row.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.results.samples import answers_of, recorded_answers
from pipelines.results.sides import EVALUATIONS
from pipelines.ui.records import Records
from stages.contracts.family import ROOT
from stages.evaluation.answers import Answer, Answered
from stages.evaluation.folder import GREEDY, SAMPLED
from stages.reporting.comparison import BeforeAfter, Outcome
from stages.reporting.markup import printable

MOST_POLICIES = 6
KEPT = 12
"""Evaluations in memory."""
_CHANGED = (Outcome.IMPROVED, Outcome.REGRESSED, Outcome.HIGHER, Outcome.LOWER)
_BETTER = (Outcome.IMPROVED, Outcome.HIGHER)
_WORSE = (Outcome.REGRESSED, Outcome.LOWER)
WHICH = ("right", "wrong", "changed", "better", "worse")


@dataclass(frozen=True)
class Wanted:
    """Which prompts to show; None: any."""

    which: str | None = None
    """One of WHICH."""
    task: str | None = None
    text: str | None = None
    """Part of the prompt, of the expected answer or of a response, in any case of letters."""
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt with the answer of each policy."""

    answered: tuple[Answered, ...]

    @property
    def last(self) -> Answered:
        return self.answered[-1]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each policy but the first, against the first."""
        first, *others = self.answered
        return [BeforeAfter(first, other).outcome for other in others]


class Evaluations:
    """The evaluations of a clone; those of the workspace are read again when they change."""

    def __init__(self, root: Path, records: Records) -> None:
        self._root, self._records = root, records
        self._lock = threading.Lock()
        self._read: dict[tuple[Any, ...], list[Answered]] = {}

    def policies(self) -> list[str]:
        """Those that were evaluated, from the first to the last of the family."""
        family = [ROOT, *load_params(self._root).rl.family]
        return [name for name in family if (self._root / EVALUATIONS / name / GREEDY).is_file()]

    def of(self, policy: str) -> list[Answered]:
        """The answers of a policy of the workspace, or of one of a revision, `REV:NAME`."""
        if ":" in policy:
            with self._records.read() as run_index:
                return recorded_answers(Repository(self._root), run_index, policy)
        known = self.policies()
        if policy not in known:
            listed = ", ".join(known) or "none: `lockstep run` evaluates them"
            raise LockstepError(f"no policy {policy!r} was evaluated here; there are {listed}")
        files = [self._root / EVALUATIONS / policy / name for name in (GREEDY, SAMPLED)]
        states = [file.stat() for file in files if file.is_file()]
        with self._lock:
            return self._workspace(policy, states)

    def _workspace(self, policy: str, states: Sequence[os.stat_result]) -> list[Answered]:
        key = (policy, *((each.st_mtime_ns, each.st_size, each.st_ino) for each in states))
        if key not in self._read:
            answers = answers_of(self._root, policy)
            for old in [each for each in self._read if each[0] == policy]:
                self._read.pop(old, None)
            while len(self._read) >= KEPT:
                self._read.pop(next(iter(self._read)), None)
            self._read[key] = answers
        return self._read[key]


def page(
    evaluations: Evaluations, policies: Sequence[str], wanted: Wanted, start: int, size: int
) -> dict[str, Any]:
    """Some of the prompts that are wanted, and how many there are."""
    if not 1 <= len(policies) <= MOST_POLICIES or len(set(policies)) < len(policies):
        raise LockstepError(f"choose 1 to {MOST_POLICIES} different policies to put side by side")
    by_policy = [{item.prompt_id: item for item in evaluations.of(name)} for name in policies]
    shared = [key for key in by_policy[-1] if all(key in answers for answers in by_policy)]
    prompts = [Prompt(tuple(answers[key] for answers in by_policy)) for key in shared]
    chosen = [prompt for prompt in prompts if _passes(prompt, wanted)]
    shown = chosen[start : start + size]
    return {
        "policies": list(policies),
        "num_prompts": len(prompts),
        "num_alone": len(set().union(*by_policy)) - len(shared),
        "num_chosen": len(chosen),
        "is_judged": any(prompt.last.is_judged for prompt in prompts),
        "tasks": sorted({prompt.last.task for prompt in prompts if prompt.last.task is not None}),
        "totals": [_totals(name, answers, shared) for name, answers in
                   zip(policies, by_policy, strict=True)],
        "prompts": [_prompt_json(prompt, policies) for prompt in shown],
    }  # fmt: skip


def sampled(evaluations: Evaluations, policies: Sequence[str], prompt_id: str) -> dict[str, Any]:
    """The sampled responses of each policy to one prompt."""
    found = {}
    for policy in policies:
        answers = (item for item in evaluations.of(policy) if item.prompt_id == prompt_id)
        answered = next(answers, None)
        if answered is None:
            raise LockstepError(f"{policy} has not answered a held-out prompt {prompt_id!r}")
        found[policy] = [_answer_json(answer) for answer in answered.sampled]
    return {"sampled": [{"policy": name, "answers": found[name]} for name in policies]}


def _passes(prompt: Prompt, wanted: Wanted) -> bool:
    last = prompt.last.greedy
    return (
        _is_which(prompt, wanted.which)
        and wanted.task in (None, prompt.last.task)
        and _within(last.reward, wanted.reward_min, wanted.reward_max)
        and _within(last.length, wanted.length_min, wanted.length_max)
        and (wanted.text is None or _has_text(prompt, wanted.text.casefold()))
    )


def _is_which(prompt: Prompt, which: str | None) -> bool:
    if which in ("right", "wrong"):
        return prompt.last.greedy.correct is (which == "right")
    kinds = {"changed": _CHANGED, "better": _BETTER, "worse": _WORSE}
    return which not in kinds or any(outcome in kinds[which] for outcome in prompt.outcomes)


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _has_text(prompt: Prompt, text: str) -> bool:
    responses = (item.greedy.response for item in prompt.answered)
    searched = (prompt.last.prompt, prompt.last.answer or "", *responses)
    return any(text in each.casefold() for each in searched)


def _totals(policy: str, answers: Mapping[str, Answered], shared: Sequence[str]) -> dict[str, Any]:
    """Over the prompts that all have answered."""
    greedy = [answers[key].greedy for key in shared]
    judged = [answer for answer in greedy if answer.correct is not None]
    return {
        "policy": policy,
        "accuracy": sum(bool(a.correct) for a in judged) / len(judged) if judged else None,
        "reward_mean": sum(a.reward for a in greedy) / len(greedy) if greedy else None,
        "length_mean": sum(a.length for a in greedy) / len(greedy) if greedy else None,
    }


def _prompt_json(prompt: Prompt, policies: Sequence[str]) -> dict[str, Any]:
    item = prompt.last
    outcomes = [None, *(outcome.value for outcome in prompt.outcomes)]
    return {
        "prompt_id": item.prompt_id,
        "prompt": printable(item.prompt),
        "answer": None if item.answer is None else printable(item.answer),
        "task": item.task,
        "answers": [
            {
                "policy": policy,
                "outcome": outcome,
                **_answer_json(answered.greedy),
                "pass_rate": answered.pass_rate,
                "num_sampled": len(answered.sampled),
            }
            for policy, answered, outcome in zip(policies, prompt.answered, outcomes, strict=True)
        ],
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "response": printable(answer.response),
        "correct": answer.correct,
        "reward": answer.reward,
        "length": answer.length,
        "finish_reason": answer.finish_reason,
    }
