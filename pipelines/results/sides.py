"""What `lockstep compare` is asked about: sides, each a policy as one dvc.lock has it.

    iter_002         a policy of the workspace
    REV:iter_002     one of a commit, a tag or a DVC experiment
    REV, or REV:     the last policy there
    workspace        the last policy of the workspace

A policy's name comes before a revision's; `sft:` is the tag `sft`. Only what DVC recorded counts:
a stage that is at work, or an edited params.yaml, changes nothing here.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.base.errors import LockstepError
from pipelines.config.params import PARAMS_FILE
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import NEEDS_PYARROW, Content
from pipelines.lineage.history import file_at, resolve
from pipelines.lineage.run_index import WORKSPACE, RunIndex
from pipelines.lineage.stage_run import Lock, StageRun
from pipelines.lineage.target import Resolver
from stages.contracts.family import ROOT
from stages.contracts.params import Params

if TYPE_CHECKING:
    from stages.evaluation.answers import Answered

EVALUATIONS = "artifacts/evaluations"
_POLICIES = "artifacts/policies"
_REWARDS = "artifacts/rewards"
_MOST_STEPS = 10_000
"""A chain of parents that is longer has a loop in it, which only an edited dvc.lock has."""


@dataclass(frozen=True, eq=False)
class Side:
    """A policy, and the lock that has it."""

    name: str
    """As the user wrote it."""
    policy: str
    commit: str | None
    """None: the workspace."""
    lock: Lock
    path: tuple[str, ...]
    """From the SFT policy to this one."""

    @property
    def where(self) -> str:
        return self.commit[:7] if self.commit else WORKSPACE

    def evaluation(self, policy: str) -> StageRun | None:
        """The stage run that evaluated a policy."""
        return evaluations(self.lock).get(policy)

    def rewarded_by(self) -> tuple[object, ...]:
        """The source of the rewards of its evaluation, with its hash."""
        return self._source("rl.reward")

    def judged_by(self) -> tuple[object, ...]:
        """The source that said what is right, with its hash, and from which reward on."""
        return self._source("evaluate.correct", "evaluate.correct_at")

    def _source(self, name: str, *more: str) -> tuple[object, ...]:
        stage_run = self.evaluation(self.policy)
        if stage_run is None:
            return ()
        source, *others = (stage_run.params.get(key) for key in (name, *more))
        return source, stage_run.inputs.get(f"{_REWARDS}/{source}"), *others


def evaluations(lock: Lock) -> dict[str, StageRun]:
    """Every policy that was evaluated, with the stage run that did."""
    return {
        PurePosixPath(path).name: stage_run
        for stage_run in lock.stages.values()
        for path in stage_run.outs
        if PurePosixPath(path).parent == PurePosixPath(EVALUATIONS)
    }


def find_sides(root: Path, run_index: RunIndex, names: Sequence[str]) -> list[Side]:
    """The sides of these names; LockstepError says what there is instead of an unknown one."""
    found = [_find(root, run_index, name.strip()) for name in names]
    for index, side in enumerate(found):
        for other in found[:index]:
            if (side.lock, side.policy) == (other.lock, other.policy):
                raise LockstepError(
                    f"{other.name} and {side.name} are the same policy of {side.where}: name "
                    "another one"
                )
    return found


def _find(root: Path, run_index: RunIndex, name: str) -> Side:
    here = run_index.workspace
    commit, lock, policy = None, here, name
    if ":" in name:
        lock, policy = Resolver(run_index, root).revision(name)
        commit = resolve(root, name.partition(":")[0])
    elif name == WORKSPACE:
        policy = ""
    elif here is None or name not in evaluations(here):
        commit = resolve(root, name)
        if commit is None:
            raise LockstepError(_unknown(name, here))
        lock, policy = Resolver(run_index, root).revision(f"{name}:")
    if lock is None:
        raise LockstepError(f"{name}: nothing is recorded in the workspace: `lockstep run` first")
    known = evaluations(lock)
    if not known:
        raise LockstepError(f"{name}: no policy was evaluated there: `lockstep run` evaluates all")
    policy = policy or _last(root, commit, lock)
    if policy not in known:
        raise LockstepError(
            f"{name}: no such policy was evaluated there; there are {', '.join(sorted(known))}"
        )
    return Side(name, policy, commit, lock, _path(lock, policy))


def _unknown(name: str, here: Lock | None) -> str:
    policies = sorted(evaluations(here)) if here else []
    near = difflib.get_close_matches(name, [*policies, WORKSPACE], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"{name!r} is neither a policy of the workspace ({', '.join(policies) or 'it has none'}) "
        f"nor a commit, tag or DVC experiment (`git tag` and `dvc exp list` list those){hint}"
    )


def _last(root: Path, commit: str | None, lock: Lock) -> str:
    """The last policy that params.yaml named then, of those that were evaluated."""
    known = evaluations(lock)
    named = [policy for policy in _family(root, commit) if policy in known]
    # Params of other versions may be unreadable today; then the one with most training behind it.
    return named[-1] if named else max(known, key=lambda policy: len(_path(lock, policy)))


def _family(root: Path, commit: str | None) -> list[str]:
    try:
        if commit is None:
            text = (root / PARAMS_FILE).read_text(encoding="utf-8")
        else:
            text = file_at(root, commit, f"./{PARAMS_FILE}") or ""
        values = YAML(typ="safe").load(text) or {}
        return list(Params.model_validate({"rl": values["rl"]}).rl.family)
    except (OSError, ValueError, YAMLError, LookupError, TypeError):
        return []


def _path(lock: Lock, policy: str) -> tuple[str, ...]:
    """The policies that it was trained through, as the records of their stages say."""
    parents = _parents(lock)
    path = [policy]
    while path[-1] != ROOT and path[-1] in parents and len(path) < _MOST_STEPS:
        path.append(parents[path[-1]])
    return tuple(reversed(path))


def _parents(lock: Lock) -> Mapping[str, str]:
    parents = {}
    for stage_run in lock.stages.values():
        start = stage_run.artifact("policy", among_inputs=True)
        if start and stage_run.key and f"{_POLICIES}/{stage_run.key}/model" in stage_run.outs:
            parents[stage_run.key] = PurePosixPath(start.path).parent.name
    return parents


def read_answers(content: Content, evaluation: Artifact) -> "list[Answered]":
    """The answers of a recorded evaluation, wherever this machine has them."""
    import tempfile

    try:
        from stages.evaluation import folder
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise LockstepError(NEEDS_PYARROW) from None
    files = content.files(evaluation)
    if missing := [name for name in (folder.GREEDY, folder.SAMPLED) if name not in files]:
        raise LockstepError(f"{evaluation.path} has no {missing[0]}: `lockstep run` computes it")
    with tempfile.TemporaryDirectory() as named:
        # In the cache, files are named by their hashes.
        for file in (folder.GREEDY, folder.SAMPLED):
            (Path(named) / file).symlink_to(files[file].resolve())
        return folder.read(Path(named))
