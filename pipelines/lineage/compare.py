"""Why two artifacts differ: their stage runs side by side, then those of their inputs, and so on.

A pair of stage runs differs in itself (params, code, given data, the stage or its key) or only
because an input does; then the producers of that input are the next pair. What differs in the pair
itself is a root cause. A different input that params or code select, such as the verifier instead
of the reward model, is not a cause but follows from them. Where params, code and inputs are equal
and the bytes are not, the environment is the cause: another kind of CPU or another number of
threads may round differently. If that is equal too, a promise is broken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipelines.identity.environment import INFORMATION_ONLY
from pipelines.identity.spec import Artifact
from pipelines.lineage.facts import defaults
from pipelines.lineage.naming import role_of
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import Lock, StageRun
from pipelines.lineage.target import Target


class CauseKind(StrEnum):
    """What makes two stage runs differ."""

    DATA = "data"
    """Given data differ."""
    STAGE = "stage"
    """Different stages produced them."""
    KEY = "key"
    """The same stage for another policy, so with other random numbers."""
    PARAM = "param"
    CODE = "code"
    ENVIRONMENT = "environment"
    """Everything else is equal."""
    UNKNOWN = "unknown"
    """The records are not enough to tell."""
    BROKEN = "broken promise"
    """Everything but the bytes is equal."""


@dataclass(frozen=True)
class Change:
    """A value on each side; None where a side has none."""

    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class InputChange:
    """An input that differs, and the pair of stage runs that it came from."""

    role: str
    old: Artifact | None
    new: Artifact | None
    pair: str | None
    chosen: bool = False
    """A different artifact, because the stage's own params or code select it."""


@dataclass(frozen=True)
class PairCause:
    """A root cause in one pair."""

    kind: CauseKind
    change: Change


@dataclass
class Pair:
    """Two stage runs side by side."""

    id: str
    old: StageRun
    new: StageRun
    params: list[Change] = field(default_factory=list)
    inputs: list[InputChange] = field(default_factory=list)
    code: list[Change] | None = None
    """Files that differ, by hash; None where the records cannot tell."""
    environment: list[Change] = field(default_factory=list)
    information: list[Change] = field(default_factory=list)
    outs: list[Change] = field(default_factory=list)
    causes: list[PairCause] = field(default_factory=list)

    @property
    def title(self) -> str:
        one, other = self.old.stage, self.new.stage
        return one if one == other else f"{one} / {other}"


@dataclass(frozen=True)
class RootCause:
    """A root cause, and every stage that has it."""

    kind: CauseKind
    change: Change
    stages: tuple[str, ...]

    @property
    def shapes_the_graph(self) -> bool:
        """Algorithm, reward, iterations: many other differences follow from them."""
        return self.kind is CauseKind.PARAM and self.change.key.startswith("rl.")


@dataclass(frozen=True)
class Comparison:
    """The outcome: whether the bytes are equal, and if not, why."""

    old: Target
    new: Target
    equal: bool
    roots: tuple[RootCause, ...]
    pairs: tuple[Pair, ...]
    """From the first stages to the last."""

    @property
    def broken(self) -> bool:
        return any(root.kind is CauseKind.BROKEN for root in self.roots)


def compare(run_index: RunIndex, old: Target, new: Target) -> Comparison:
    """Compare two targets; their stage runs are compared even if their bytes are equal."""
    equal = _hashes(old) == _hashes(new)
    if old.stage_run is None or new.stage_run is None:
        roots = () if equal else (_given_root(old, new),)
        return Comparison(old, new, equal, roots, ())
    walker = _Walker(run_index, old.lock, new.lock)
    walker.pair(old.stage_run, new.stage_run)
    return Comparison(old, new, equal, walker.roots(), tuple(walker.pairs.values()))


def _hashes(target: Target) -> dict[str, str]:
    """What is compared: one artifact, or all outputs of a stage run."""
    if target.artifact is not None:
        return {"": target.artifact.hash}
    assert target.stage_run is not None
    return _outs(target.stage_run)


def _given_root(old: Target, new: Target) -> RootCause:
    values = [
        f"made by {target.stage_run.stage}" if target.stage_run else f"{target.title} was given"
        for target in (old, new)
    ]
    return RootCause(CauseKind.DATA, Change(new.title, *values), ())


def _outs(stage_run: StageRun) -> dict[str, str]:
    """The hashes of its outputs but the metrics, under the names of its contract."""
    roles = (
        (role_of(stage_run.stage, p, among_inputs=False), h) for p, h in stage_run.outs.items()
    )
    return {role: digest for role, digest in roles if role != "metrics"}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, in order."""
    keys = dict.fromkeys([*old, *new])
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


class _Walker:
    """Walks upstream on both sides at once. A pair is added after the pairs above it."""

    def __init__(self, run_index: RunIndex, old: Lock | None, new: Lock | None) -> None:
        self._run_index = run_index
        self._locks = (old, new)
        self.pairs: dict[str, Pair] = {}

    def pair(self, old: StageRun, new: StageRun) -> str:
        name = f"{old.id}:{new.id}"
        if name in self.pairs or old is new:
            return name
        pair = Pair(name, old, new, outs=_out_changes(old, new))
        if old.name != new.name:
            pair.causes.append(PairCause(CauseKind.STAGE, Change("stage", old.stage, new.stage)))
            self.pairs[name] = pair
            return name
        pair.params = _param_changes(old, new)
        pair.code = _code_changes(old, new)
        pair.inputs = list(self._inputs(pair))
        _compare_environments(pair)
        self.pairs[name] = pair
        pair.causes += _own_causes(pair)
        return name

    def _inputs(self, pair: Pair) -> Iterable[InputChange]:
        before, after = self._artifacts(0, pair.old), self._artifacts(1, pair.new)
        for role in dict.fromkeys([*before, *after]):
            old, new = before.get(role), after.get(role)
            hashes = [item.hash if item else None for item in (old, new)]
            if hashes[0] == hashes[1]:
                continue
            if _is_chosen(pair, role, old, new):
                yield InputChange(role, old, new, None, chosen=True)
                continue
            makers = self._maker(0, old), self._maker(1, new)
            above = self.pair(makers[0], makers[1]) if makers[0] and makers[1] else None
            if above is None:
                path = next(item.path for item in (new, old) if item)
                pair.causes.append(PairCause(CauseKind.DATA, Change(path, *hashes)))
            yield InputChange(role, old, new, above)

    def _artifacts(self, side: int, stage_run: StageRun) -> dict[str, Artifact]:
        """Its inputs by role; a folder that was read as a whole, by its parts."""
        lock = self._run_index.lock_of(stage_run, self._locks[side])
        artifacts: dict[str, Artifact] = {}
        for path, digest in stage_run.inputs.items():
            artifact = Artifact(path, digest)
            role = role_of(stage_run.stage, path, among_inputs=True)
            known = self._run_index.makers(artifact, lock)
            parts = [] if known else self._run_index.inside(stage_run, path)
            if parts:
                artifacts |= {role + part.path.removeprefix(path): part for part in parts}
            else:
                artifacts[role] = artifact
        return artifacts

    def _maker(self, side: int, artifact: Artifact | None) -> StageRun | None:
        if artifact is None:
            return None
        return next(iter(self._run_index.makers(artifact, self._locks[side])), None)

    def roots(self) -> tuple[RootCause, ...]:
        """The causes of all pairs, equal ones merged: those that shape the graph first."""
        merged: dict[str, RootCause] = {}
        for pair in self.pairs.values():
            for cause in pair.causes:
                # The same data or file is one cause in all stages; broken bytes are per stage.
                key = f"{pair.id if cause.kind in _OF_ONE_STAGE else ''}{cause!r}"
                known = merged.get(key)
                stages = (*(known.stages if known else ()), pair.title)
                merged[key] = RootCause(cause.kind, cause.change, stages)
        roots = merged.values()
        return tuple(sorted(roots, key=lambda root: not root.shapes_the_graph))


_OF_ONE_STAGE = (CauseKind.ENVIRONMENT, CauseKind.BROKEN, CauseKind.UNKNOWN, CauseKind.STAGE)


def _is_chosen(pair: Pair, role: str, old: Artifact | None, new: Artifact | None) -> bool:
    """Whether a stage read another artifact because its own params or code select it.

    Which policy it starts from is set by the graph, not by a param of the stage.
    """
    if role == "policy" or pair.old.key != pair.new.key or not (pair.params or pair.code):
        return False
    return old is None or new is None or old.path != new.path


def _out_changes(old: StageRun, new: StageRun) -> list[Change]:
    before, after = _outs(old), _outs(new)
    return [item for item in changes(before, after) if item.key in before and item.key in after]


def _param_changes(old: StageRun, new: StageRun) -> list[Change]:
    """A param that one side does not name has its default."""
    known = {key: defaults().get(key) for key in (*old.params, *new.params)}
    return changes({**known, **old.params}, {**known, **new.params})


def _code_changes(old: StageRun, new: StageRun) -> list[Change] | None:
    if old.code and new.code:
        return changes(old.code, new.code)
    if old.code_version and new.code_version:
        return changes({"code": old.code_version}, {"code": new.code_version})
    return None


def _compare_environments(pair: Pair) -> None:
    if not (pair.old.environment and pair.new.environment):
        return
    old, new = pair.old.environments, pair.new.environments
    for key in dict.fromkeys(key for each in (*old, *new) for key in each):
        sides = _values(old, key), _values(new, key)
        # Two that moved between the same machines may have done so at different steps.
        if sides[0] != sides[1] or len(sides[0]) > 1:
            known = pair.information if key in INFORMATION_ONLY else pair.environment
            known.append(Change(key, *(_in_turn(values) for values in sides)))


def _values(environments: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Each once, in order."""
    values: list[Any] = []
    for environment in environments:
        if environment.get(key) not in values:
            values.append(environment.get(key))
    return values


def _in_turn(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else ", then ".join(map(str, values))


def _own_causes(pair: Pair) -> list[PairCause]:
    """What differs in the pair itself, besides given data."""
    causes = []
    if pair.old.key != pair.new.key:
        causes.append(PairCause(CauseKind.KEY, Change("key", pair.old.key, pair.new.key)))
    causes += [PairCause(CauseKind.PARAM, change) for change in pair.params]
    causes += [PairCause(CauseKind.CODE, change) for change in pair.code or ()]
    if causes or pair.inputs or not pair.outs:
        return causes
    if pair.environment:
        return [PairCause(CauseKind.ENVIRONMENT, change) for change in pair.environment]
    change = Change(pair.new.stage, pair.outs[0].old, pair.outs[0].new)
    known = pair.code is not None and pair.old.environment and pair.new.environment
    return [PairCause(CauseKind.BROKEN if known else CauseKind.UNKNOWN, change)]
