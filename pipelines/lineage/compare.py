"""Why two artifacts differ: their makings side by side, and so on up the graph.

A pair of makings differs in itself (params, code, data that were given, the stage or its key) or
only because an input does; then the makers of that input are the next pair. What a pair differs in
by itself is a root cause. An input that its params or code chose otherwise, such as the verifier
instead of the reward model, is no cause but follows from them. Where params, code and inputs are
equal and the bytes are not, the environment is the cause: another kind of CPU or another number of
threads may round differently. If that is equal too, a promise is broken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipelines.identity.environment import INFORMATION_ONLY
from pipelines.lineage.evidence import Artifact, Evidence
from pipelines.lineage.facts import defaults
from pipelines.lineage.making import Lock, Making
from pipelines.lineage.naming import role_of
from pipelines.lineage.target import Target


class Cause(StrEnum):
    """What makes two makings differ, of itself."""

    DATA = "data"
    """Data that were given differ."""
    STAGE = "stage"
    """Different stages made them."""
    KEY = "key"
    """The same stage for another policy: its random numbers are others."""
    PARAM = "param"
    CODE = "code"
    ENVIRONMENT = "environment"
    """All else is equal."""
    UNKNOWN = "unknown"
    """The records are not enough to tell."""
    BROKEN = "broken promise"
    """All is equal but the bytes."""


@dataclass(frozen=True)
class Change:
    """A value on each side; None where a side has none."""

    key: str
    old: Any
    new: Any

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class InputChange:
    """An input that differs, and the pair of makings that it came from."""

    role: str
    old: Artifact | None
    new: Artifact | None
    pair: str | None
    chosen: bool = False
    """Another artifact altogether, because the stage's own params or code ask for it."""

    def as_json(self) -> dict[str, Any]:
        old, new = (vars(item) if item else None for item in (self.old, self.new))
        return {"input": self.role, "old": old, "new": new, "made_by": self.pair}


@dataclass(frozen=True)
class Found:
    """A root cause in one pair."""

    cause: Cause
    change: Change


@dataclass
class Pair:
    """Two makings side by side."""

    id: str
    old: Making
    new: Making
    params: list[Change] = field(default_factory=list)
    inputs: list[InputChange] = field(default_factory=list)
    code: list[Change] | None = None
    """Files that differ, by hash; None where the records cannot tell."""
    environment: list[Change] = field(default_factory=list)
    information: list[Change] = field(default_factory=list)
    outs: list[Change] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    @property
    def title(self) -> str:
        one, other = self.old.stage, self.new.stage
        return one if one == other else f"{one} / {other}"


@dataclass(frozen=True)
class Root:
    """A root cause, and every stage in which it shows."""

    cause: Cause
    change: Change
    stages: tuple[str, ...]

    @property
    def shapes_the_graph(self) -> bool:
        """Algorithm, reward, iterations: much of the rest follows from them."""
        return self.cause is Cause.PARAM and self.change.key.startswith("rl.")


@dataclass(frozen=True)
class Comparison:
    """The outcome: whether the bytes are equal, and if not, why."""

    old: Target
    new: Target
    equal: bool
    roots: tuple[Root, ...]
    pairs: tuple[Pair, ...]
    """From the first stages to the last."""

    @property
    def broken(self) -> bool:
        return any(root.cause is Cause.BROKEN for root in self.roots)


def compare(evidence: Evidence, old: Target, new: Target) -> Comparison:
    """Compare two targets; their makings are compared even if their bytes are equal."""
    equal = _hashes(old) == _hashes(new)
    if old.making is None or new.making is None:
        roots = () if equal else (_given_root(old, new),)
        return Comparison(old, new, equal, roots, ())
    walker = _Walker(evidence, old.lock, new.lock)
    walker.pair(old.making, new.making)
    return Comparison(old, new, equal, walker.roots(), tuple(walker.pairs.values()))


def _hashes(target: Target) -> dict[str, str]:
    """What is compared: one artifact, or all that a making left."""
    if target.artifact is not None:
        return {"": target.artifact.hash}
    assert target.making is not None
    return {
        role: digest
        for role, digest in by_role(target.making, target.making.outs, inputs=False).items()
        if role != "metrics"
    }


def _given_root(old: Target, new: Target) -> Root:
    values = [
        f"made by {target.making.stage}" if target.making else f"{target.title} was given"
        for target in (old, new)
    ]
    return Root(Cause.DATA, Change(new.title, *values), ())


def by_role(making: Making, paths: Mapping[str, str], *, inputs: bool) -> dict[str, str]:
    """The hashes of a making's inputs or outputs, under the names of its contract."""
    return {role_of(making.stage, p, among_inputs=inputs): digest for p, digest in paths.items()}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, in order."""
    keys = dict.fromkeys([*old, *new])
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


class _Walker:
    """Goes up both sides at once. A pair is entered after the pairs above it."""

    def __init__(self, evidence: Evidence, old: Lock | None, new: Lock | None) -> None:
        self._evidence = evidence
        self._locks = (old, new)
        self.pairs: dict[str, Pair] = {}

    def pair(self, old: Making, new: Making) -> str:
        name = f"{old.id}:{new.id}"
        if name in self.pairs or old is new:
            return name
        pair = Pair(name, old, new, outs=_out_changes(old, new))
        if old.name != new.name:
            pair.found.append(Found(Cause.STAGE, Change("stage", old.stage, new.stage)))
            self.pairs[name] = pair
            return name
        pair.params = _param_changes(old, new)
        pair.code = _code_changes(old, new)
        pair.inputs = list(self._inputs(pair))
        _compare_environments(pair)
        self.pairs[name] = pair
        pair.found += _own_causes(pair)
        return name

    def _inputs(self, pair: Pair) -> Iterable[InputChange]:
        sides = [self._artifacts(side, making) for side, making in enumerate((pair.old, pair.new))]
        for role in dict.fromkeys([*sides[0], *sides[1]]):
            old, new = sides[0].get(role), sides[1].get(role)
            if (old.hash if old else None) == (new.hash if new else None):
                continue
            if _is_chosen(pair, role, old, new):
                yield InputChange(role, old, new, None, chosen=True)
                continue
            makers = [self._maker(side, item) for side, item in enumerate((old, new))]
            above = self.pair(makers[0], makers[1]) if makers[0] and makers[1] else None
            if above is None:
                hashes = (item.hash if item else None for item in (old, new))
                path = next(item.path for item in (new, old) if item)
                pair.found.append(Found(Cause.DATA, Change(path, *hashes)))
            yield InputChange(role, old, new, above)

    def _artifacts(self, side: int, making: Making) -> dict[str, Artifact]:
        """Its inputs by role; a folder that was read as a whole, by its parts."""
        lock = self._evidence.lock_of(making, self._locks[side])
        found: dict[str, Artifact] = {}
        for path, digest in making.inputs.items():
            artifact = Artifact(path, digest)
            role = role_of(making.stage, path, among_inputs=True)
            known = self._evidence.makers(artifact, lock)
            parts = [] if known else self._evidence.inside(making, path)
            if parts:
                found |= {f"{role}/{part.path.removeprefix(path + '/')}": part for part in parts}
            else:
                found[role] = artifact
        return found

    def _maker(self, side: int, artifact: Artifact | None) -> Making | None:
        if artifact is None:
            return None
        return next(iter(self._evidence.makers(artifact, self._locks[side])), None)

    def roots(self) -> tuple[Root, ...]:
        """The causes of all pairs, equal ones joined: what shapes the graph, then by stage."""
        stages: dict[tuple[Cause, str], list[str]] = {}
        kept: dict[tuple[Cause, str], Found] = {}
        for pair in self.pairs.values():
            for found in pair.found:
                # Data and files are themselves; broken bytes are a matter of one stage.
                own = pair.id if found.cause in _OF_ONE_STAGE else ""
                change = found.change
                key = (found.cause, f"{own}{change.key}\0{change.old!r}\0{change.new!r}")
                kept.setdefault(key, found)
                stages.setdefault(key, []).append(pair.title)
        roots = [Root(found.cause, found.change, tuple(stages[key])) for key, found in kept.items()]
        return tuple(sorted(roots, key=lambda root: not root.shapes_the_graph))


_OF_ONE_STAGE = (Cause.ENVIRONMENT, Cause.BROKEN, Cause.UNKNOWN, Cause.STAGE)


def _is_chosen(pair: Pair, role: str, old: Artifact | None, new: Artifact | None) -> bool:
    """Whether a stage read another artifact because its own params or code say so.

    Which policy it starts from is said by the graph, not by a param of its own.
    """
    if role == "policy" or pair.old.key != pair.new.key or not (pair.params or pair.code):
        return False
    return old is None or new is None or old.path != new.path


def _out_changes(old: Making, new: Making) -> list[Change]:
    sides = [by_role(making, making.outs, inputs=False) for making in (old, new)]
    shared = [role for role in sides[0] if role in sides[1] and role != "metrics"]
    return changes(*({role: side[role] for role in shared} for side in sides))


def _param_changes(old: Making, new: Making) -> list[Change]:
    """What a side does not name has its default."""
    known = defaults()
    keys = dict.fromkeys([*old.params, *new.params])
    filled = [
        {key: side[key] if key in side else known.get(key) for key in keys}
        for side in (old.params, new.params)
    ]
    return changes(*filled)


def _code_changes(old: Making, new: Making) -> list[Change] | None:
    if old.code and new.code:
        return changes(old.code, new.code)
    if old.code_version and new.code_version:
        versions = {"code": old.code_version}, {"code": new.code_version}
        return changes(*versions)
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
    found: list[Any] = []
    for environment in environments:
        if environment.get(key) not in found:
            found.append(environment.get(key))
    return found


def _in_turn(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else ", then ".join(map(str, values))


def _own_causes(pair: Pair) -> list[Found]:
    """What the pair differs in by itself, beside given data."""
    found = []
    if pair.old.key != pair.new.key:
        found.append(Found(Cause.KEY, Change("key", pair.old.key, pair.new.key)))
    found += [Found(Cause.PARAM, change) for change in pair.params]
    found += [Found(Cause.CODE, change) for change in pair.code or ()]
    if found or pair.inputs or not pair.outs:
        return found
    if pair.environment:
        return [Found(Cause.ENVIRONMENT, change) for change in pair.environment]
    change = Change(pair.new.stage, pair.outs[0].old, pair.outs[0].new)
    known = pair.code is not None and pair.old.environment and pair.new.environment
    return [Found(Cause.BROKEN if known else Cause.UNKNOWN, change)]
