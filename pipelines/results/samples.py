"""`lockstep samples`: show a policy's answers to the held-out prompts.

Reads the folders of two evaluations and nothing else: no job, no MLflow. Those of another commit,
`REV:POLICY`, come from DVC's cache. Prompts are filtered first and then ordered; wins and losses
are ordered by the change of reward, largest first.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.lineage.content import NEEDS_PYARROW, Content
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.target import Resolver
from pipelines.results.sides import EVALUATIONS, evaluations, read_answers
from stages.contracts.family import ROOT
from stages.reporting.markup import printable

if TYPE_CHECKING:
    from stages.evaluation.answers import Answer, Answered
    from stages.evaluation.contest import Contest

_MARKS = {True: "right", False: "wrong", None: ""}
_ENDINGS = {"length": "cut off", "failed": "environment failed"}


@dataclass(frozen=True)
class Sample:
    """A prompt with two policies' answers."""

    mine: "Answered"
    theirs: "Answered | None"
    won: float | None

    @property
    def gain(self) -> float:
        return self.mine.greedy.reward - self.theirs.greedy.reward if self.theirs else 0.0

    def as_json(self, *, sampled: bool) -> dict[str, Any]:
        item = self.mine
        values = {
            "prompt_id": item.prompt_id,
            "prompt": item.prompt,
            "answer": item.answer,
            "task": item.task,
            **asdict(item.greedy),
            "pass_rate": item.pass_rate,
            "reference_response": self.theirs.greedy.response if self.theirs else None,
            "reference_reward": self.theirs.greedy.reward if self.theirs else None,
            "won": self.won,
        }
        del values["vote"]
        return {**values, **({"sampled": [asdict(a) for a in item.sampled]} if sampled else {})}


_FILTERS: dict[str, Callable[[Sample], bool]] = {
    "wrong": lambda sample: sample.mine.greedy.correct is False,
    "right": lambda sample: sample.mine.greedy.correct is True,
    "lost": lambda sample: sample.won == 0.0,
    "won": lambda sample: sample.won == 1.0,
}


@dataclass(frozen=True)
class Query:
    """Which samples to show; without a policy, those of the last."""

    policy: str | None = None
    which: str | None = None
    """wrong, right, lost or won."""
    task: str | None = None
    against: str | None = None
    sampled: bool = False
    limit: int = 0
    """0: all."""


def samples(root: Path, query: Query, *, as_json: bool) -> str:
    """The output of the command."""
    family = [ROOT, *load_params(root).rl.family]
    policy = _known(query.policy or family[-1], family)
    revision, colon, _ = policy.rpartition(":")
    against = _known(query.against or f"{revision}{colon}{ROOT}", family)
    if query.limit < 0:
        raise LockstepError("-n takes a number of prompts, 0 for all")
    if against == policy:
        if query.against or query.which in ("lost", "won"):
            raise LockstepError(
                f"{policy} would be compared with itself: pass another policy with --against"
            )
        against = ""
    everything = _all(root, policy, against)
    chosen = _select(everything, query.which, query.task)
    shown = chosen[: query.limit or None]
    if as_json:
        return json.dumps(
            {
                "policy": policy,
                "against": against or None,
                "num_prompts": len(everything),
                "num_chosen": len(chosen),
                "samples": [sample.as_json(sampled=query.sampled) for sample in shown],
            },
            indent=2,
            ensure_ascii=False,
        )
    return _render(policy, against, everything, chosen, shown, query)


def _known(policy: str, family: list[str]) -> str:
    """A policy of the workspace; one of another revision is looked up in its dvc.lock."""
    if ":" not in policy and policy not in family:
        raise LockstepError(f"there is no policy {policy!r}; there are {', '.join(family)}")
    return policy


def _all(root: Path, policy: str, against: str) -> list[Sample]:
    mine = answers_of(root, policy)
    if not against:
        return [Sample(item, None, None) for item in mine]
    from stages.evaluation.contest import contest

    theirs = answers_of(root, against)
    try:
        compared: Contest = contest(mine, theirs)
    except ValueError as error:
        raise LockstepError(
            f"{policy} and {against}: {error}; `lockstep run` brings both up to date"
        ) from None
    rows = zip(mine, theirs, compared.won, strict=True)
    return [Sample(one, other, won) for one, other, won in rows]


def answers_of(root: Path, policy: str) -> "list[Answered]":
    """A policy's answers to all held-out prompts, as its evaluation left them."""
    try:
        from stages.context import StageError
        from stages.evaluation import folder
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise LockstepError(NEEDS_PYARROW) from None
    if ":" in policy:
        repository = Repository(root)
        return recorded_answers(repository, gather(repository), policy)
    path = root / EVALUATIONS / policy
    for name in (folder.GREEDY, folder.SAMPLED):
        if not (path / name).is_file():
            raise LockstepError(
                f"{path / name} does not exist: `lockstep run` evaluates {policy}, or `dvc pull "
                f"artifacts/evaluations/{policy}` fetches it from a remote"
            )
    try:
        return folder.read(path)
    except (StageError, ValueError, OSError) as error:
        raise LockstepError(
            f"{path} cannot be read as an evaluation ({error}): `lockstep verify` checks "
            "whether it is damaged, `lockstep run` computes it again"
        ) from None


def recorded_answers(repository: Repository, run_index: RunIndex, policy: str) -> "list[Answered]":
    """The answers of an evaluation in the dvc.lock of a commit, tag or experiment."""
    lock, name = Resolver(run_index, repository.root).revision(policy)
    assert lock is not None
    recorded = evaluations(lock)
    if name not in recorded:
        known = ", ".join(sorted(recorded)) or "none"
        raise LockstepError(f"{policy}: no such policy was evaluated there; there are {known}")
    evaluation = recorded[name].required("evaluation", among_inputs=False)
    return read_answers(Content(repository, run_index), evaluation)


def _select(everything: list[Sample], which: str | None, task: str | None) -> list[Sample]:
    if task is not None and not any(sample.mine.task == task for sample in everything):
        names = sorted({s.mine.task for s in everything if s.mine.task is not None})
        known = f"there are {', '.join(names)}" if names else "no prompt has a task"
        raise LockstepError(f"there is no task {task!r}; {known}")
    if which in ("wrong", "right") and not any(s.mine.is_judged for s in everything):
        raise LockstepError(
            f"--{which}: the data have no expected answers; --won and --lost compare rewards"
        )
    keep = _FILTERS.get(which or "")
    chosen = [s for s in everything if task in (None, s.mine.task) and (not keep or keep(s))]
    if which in ("lost", "won"):
        chosen.sort(key=lambda sample: -abs(sample.gain))
    return chosen


def _render(
    policy: str,
    against: str,
    everything: list[Sample],
    chosen: list[Sample],
    shown: list[Sample],
    query: Query,
) -> str:
    what = " ".join(filter(None, (query.which, query.task and f"of task {query.task}")))
    lines = [
        f"{policy}: {len(shown)} of {len(chosen)} {f'prompts ({what})' if what else 'prompts'}"
        + ("" if len(chosen) == len(everything) else f", of {len(everything)} in all")
    ]
    if against and everything:
        rate = statistics.fmean(s.won for s in everything if s.won is not None)
        lines[0] += f"; by reward it wins {rate:.1%} against {against}"
    width = max(len(policy), len(against), len("expected"))
    for sample in shown:
        item = sample.mine
        task = f"  [{item.task}]" if item.task else ""
        lines += ["", f"{item.prompt_id}{task}", *_field("prompt", item.prompt, width)]
        if item.answer is not None:
            lines += _field("expected", item.answer, width)
        lines += _answer(policy, item.greedy, width, item.pass_rate)
        if sample.theirs:
            lines += _answer(against, sample.theirs.greedy, width, sample.theirs.pass_rate)
        if query.sampled:
            for index, answer in enumerate(item.sampled):
                lines += _answer(f"sample {index}", answer, width, None)
    left = len(chosen) - len(shown)
    if left:
        lines += ["", f"{left} more: -n N, or -n 0 for all"]
    return "\n".join(lines)


def _answer(name: str, answer: "Answer", width: int, pass_rate: float | None) -> list[str]:
    ended = _ENDINGS.get(answer.finish_reason, "")
    often = "" if pass_rate is None else f"{pass_rate:.0%} of samples right"
    parts = (
        _MARKS[answer.correct],
        f"reward {answer.reward:.4g}",
        f"{answer.length} tokens",
        ended,
    )
    notes = ", ".join(filter(None, (*parts, often)))
    return [*_field(name, answer.response or "(empty)", width), f"{'':{width + 4}}({notes})"]


def _field(name: str, text: str, width: int) -> list[str]:
    first, *rest = printable(text).split("\n")
    return [f"  {name:<{width}}  {first}", *(f"{'':{width + 4}}{line}" for line in rest)]
