"""Policies side by side: the facts of `lockstep compare`, as values for whoever shows them.

Numbers are those that the evaluations recorded, found by the hash that dvc.lock has of them. What
two policies did prompt by prompt is computed from their stored answers, on the prompts that both
answered, by the functions that evaluate and report use. What is gone from this machine is left out
with a note that says how to bring it back; nothing is run and nothing written.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.lineage.content import Content
from pipelines.lineage.facts import defaults
from pipelines.lineage.history import file_at
from pipelines.lineage.run_index import gather
from pipelines.lineage.stage_run import StageRun
from pipelines.results.changed_sides import Pair, pair_up
from pipelines.results.sides import Side, find_sides, read_answers
from stages.reporting.vocabulary import describe, in_order
from stages.standard_error import error_name

if TYPE_CHECKING:
    from stages.evaluation.answers import Answered

MOST_SIDES = 6
"""As many as a chart has colours."""
CURVES = (
    *("accuracy", "accuracy_sampled", "win_rate", "reward_mean"),
    *("kl_to_reference", "entropy", "response_length"),
)
_MISSING = object()

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class ParamChange:
    key: str
    values: tuple[Any, ...]
    """One for each side; None where it has no such param."""


@dataclass(frozen=True)
class Value:
    """A number and how sure it is: an interval, a standard error, or neither."""

    value: float
    low: float | None = None
    high: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class MetricRow:
    name: str
    label: str
    values: tuple[Value | None, ...]
    """One for each side."""


@dataclass(frozen=True)
class CurvePoint:
    policy: str
    step: int
    """How many iterations of training the policy has behind it; SFT has 0."""
    at: Value


@dataclass(frozen=True)
class Curve:
    """One metric along the policies that each side was trained through."""

    name: str
    label: str
    lines: tuple[tuple[CurvePoint, ...], ...]
    """One for each side."""


@dataclass(frozen=True)
class SideFacts:
    name: str
    policy: str
    revision: str
    """`workspace`, or a commit."""
    path: tuple[str, ...]
    evaluation: str
    """DVC's hash of its answers."""


@dataclass(frozen=True)
class Comparison:
    sides: tuple[SideFacts, ...]
    params: tuple[ParamChange, ...]
    metrics: tuple[MetricRow, ...]
    curves: tuple[Curve, ...]
    pairs: tuple[Pair, ...]
    """Every two sides, the earlier one first."""
    notes: tuple[str, ...] = field(default=())

    def as_json(self, limit: int | None = None) -> dict[str, Any]:
        """Everything; of each pair's changed samples no more than `limit`."""
        pairs = [pair.as_json(limit) for pair in self.pairs]
        shown = asdict(self)
        return {**shown, "pairs": pairs}


def compare(repository: Repository, names: Sequence[str]) -> Comparison:
    """Compare the sides of these names; LockstepError says which of them is unknown."""
    if len(names) < 2:
        raise LockstepError("name at least two to compare, as in `lockstep compare sft iter_001`")
    if len(names) > MOST_SIDES:
        raise LockstepError(f"at most {MOST_SIDES} can be compared at once, not {len(names)}")
    run_index = gather(repository)
    sides = find_sides(repository.root, run_index, names)
    reader = _Reader(repository, Content(repository, run_index), list(run_index.notes))
    numbers = [{policy: reader.numbers(side, policy) for policy in side.path} for side in sides]
    answers = [reader.answers(side) for side in sides]
    pairs = []
    for (i, one), (j, other) in combinations(enumerate(answers), 2):
        if one is not None and other is not None:
            pair = pair_up(
                i,
                j,
                one,
                other,
                same_reward=sides[i].rewarded_by() == sides[j].rewarded_by(),
                same_judge=sides[i].judged_by() == sides[j].judged_by(),
            )
            pairs.append(pair)
            reader.note_other_sources(sides[i], sides[j])
            if pair.only_in_old or pair.only_in_new:
                reader.note(
                    f"{sides[i].name} and {sides[j].name} were evaluated on different prompts: "
                    f"{pair.num_prompts} are the same, and only these are compared"
                )
    return Comparison(
        sides=tuple(map(_facts, sides)),
        params=_params(sides),
        metrics=_metrics([of[side.policy] for side, of in zip(sides, numbers, strict=True)]),
        curves=_curves(sides, numbers),
        pairs=tuple(pairs),
        notes=tuple(reader.notes),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads what is recorded, and notes what is not there."""

    repository: Repository
    content: Content
    notes: list[str]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def note_other_sources(self, old: Side, new: Side) -> None:
        both = f"{old.name} and {new.name}"
        if old.rewarded_by() != new.rewarded_by():
            self.note(
                f"{both} were rewarded by different sources, or versions of one, so their rewards "
                "and wins are not compared prompt by prompt, nor are those among the metrics "
                "comparable"
            )
        if old.judged_by() != new.judged_by():
            self.note(
                f"what is right was judged differently for {both}, so their correctness is not "
                "compared prompt by prompt, nor is the accuracy among the metrics comparable"
            )

    def answers(self, side: Side) -> "list[Answered] | None":
        try:
            return read_answers(
                self.content, _evaluation(side).required("evaluation", among_inputs=False)
            )
        except LockstepError as error:
            self.note(f"the answers of {side.name} are not compared: {error}")
            return None

    def numbers(self, side: Side, policy: str) -> Numbers:
        """What the evaluation of a policy measured; nothing where it was not evaluated."""
        stage_run = side.evaluation(policy)
        if stage_run is None:
            return {}
        artifact = stage_run.artifact("metrics", among_inputs=False)
        if artifact is None:
            return {}
        text = self._recorded(side, stage_run, artifact.path, artifact.hash)
        try:
            values = json.loads(text) if text is not None else None
        except ValueError:
            values = None
        if not isinstance(values, dict):
            self.note(
                f"{artifact.path} of {side.name} is not here as it was recorded, so its numbers "
                "are left out: commit `metrics` with dvc.lock, or `dvc checkout` and rerun"
            )
            return {}
        return {name: float(v) for name, v in values.items() if type(v) in (int, float)}

    def _recorded(self, side: Side, stage_run: StageRun, path: str, md5: str) -> str | None:
        """Summary metrics are in git: in the workspace, or in a commit that has them."""
        here = self.repository.root / path
        commits = [side.commit, *reversed(stage_run.commits)]
        texts = [here.read_bytes() if here.is_file() else b""]
        for commit in dict.fromkeys(filter(None, commits)):
            if hashlib.md5(texts[-1]).hexdigest() == md5:
                break
            texts.append((file_at(self.repository.root, commit, f"./{path}") or "").encode())
        found = texts[-1]
        return found.decode() if hashlib.md5(found).hexdigest() == md5 else None


def _evaluation(side: Side) -> StageRun:
    stage_run = side.evaluation(side.policy)
    assert stage_run is not None
    return stage_run


def _facts(side: Side) -> SideFacts:
    evaluation = _evaluation(side).required("evaluation", among_inputs=False)
    return SideFacts(side.name, side.policy, side.commit or side.where, side.path, evaluation.hash)


def _params(sides: Sequence[Side]) -> tuple[ParamChange, ...]:
    """What was recorded with each side; a param that a lock does not name has its default."""
    recorded = [_recorded_params(side) for side in sides]
    keys = dict.fromkeys(key for params in recorded for key in params)
    changes = []
    for key in sorted(keys):
        default = defaults().get(key, _MISSING)
        values = [params.get(key, default) for params in recorded]
        if any(value != values[0] for value in values):
            shown = (None if value is _MISSING else value for value in values)
            changes.append(ParamChange(key, tuple(shown)))
    return tuple(changes)


def _recorded_params(side: Side) -> dict[str, Any]:
    """Of all stages; where one was not rerun, those of the stages that this policy came through
    count."""
    own = {f"@{policy}" for policy in side.path}
    ranked = sorted(
        side.lock.stages.values(),
        key=lambda run: (run.name != "report", not run.key or f"@{run.key}" in own),
    )
    return {key: value for run in ranked for key, value in run.params.items()}


def _metrics(numbers: Sequence[Numbers]) -> tuple[MetricRow, ...]:
    known = {name for of in numbers for name in of}
    own = {name for name in known if _base(name) == name or _base(name) not in known}
    return tuple(
        MetricRow(name, describe(name).label, tuple(_value(name, of) for of in numbers))
        for name in in_order(own)
    )


def _base(name: str) -> str:
    """The metric that an interval's end or an error belongs to."""
    whole, slash, part = name.partition("/")
    for ending in ("_low", "_high", "_error"):
        whole = whole.removesuffix(ending)
    return f"{whole}{slash}{part}"


def _value(name: str, numbers: Numbers) -> Value | None:
    if name not in numbers:
        return None
    low, high = numbers.get(f"{name}_low"), numbers.get(f"{name}_high")
    return Value(numbers[name], low, high, numbers.get(error_name(name)))


def _curves(sides: Sequence[Side], numbers: Sequence[Mapping[str, Numbers]]) -> tuple[Curve, ...]:
    curves = []
    for name in CURVES:
        lines: list[tuple[CurvePoint, ...]] = []
        for side, of in zip(sides, numbers, strict=True):
            lines.append(
                tuple(
                    CurvePoint(policy, step, at)
                    for step, policy in enumerate(side.path)
                    if (at := _value(name, of[policy]))
                )
            )
        if any(len(line) > 1 for line in lines):
            curves.append(Curve(name, describe(name).label, tuple(lines)))
    return tuple(curves)
