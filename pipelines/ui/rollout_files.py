"""The files behind the rollouts of an iteration: what was sampled, its scores, what trained on it.

An iteration is named as params.yaml names it: then its files are those of the workspace. Or it is
a stage run of the lineage, `run:ID`: then they are the files with exactly the recorded bytes,
wherever this machine has them.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.target import name_of
from stages.contracts.catalog import STAGES

RUN = "run:"
_SAMPLING = ("rollout", "online")


@dataclass(frozen=True)
class RolloutFiles:
    """Where they are; None: there is none."""

    name: str
    target: str
    """What its lineage is asked by."""
    policy: str | None
    """Who sampled: the policy that the iteration starts from."""
    rollouts: Path
    scores: Path | None
    experience: Path | None
    tokenizer: Path | None
    copies: Path
    """Where copies in small row groups are."""


def copies_of(root: Path) -> Path:
    return Repository(root).home / "ui/rows"


def iterations(root: Path) -> dict[str, str | None]:
    """Those whose rollouts the workspace has, in the order of the params, with their parents."""
    family = load_params(root).rl.family
    there = {path.stem for path in (root / _path("rollouts", "x")).parent.glob("*.parquet")}
    known: dict[str, str | None] = {name: family[name] for name in family if name in there}
    return known | dict.fromkeys(sorted(there - family.keys()))


def of_workspace(root: Path, name: str) -> RolloutFiles:
    """The files of an iteration as they are now."""
    known = iterations(root)
    if name not in known:
        listed = ", ".join(known) or "none: `lockstep run` computes them"
        raise LockstepError(
            f"there are no rollouts of {name!r} in the workspace; there are {listed}"
        )
    policy = known[name]
    return RolloutFiles(
        name,
        f"rollouts@{name}",
        policy,
        root / _path("rollouts", name),
        _there(root / _path("scores", name)),
        _there(root / _path("experience", name)),
        _tokenizer(root, policy),
        copies_of(root),
    )


def of_stage_run(root: Path, run_index: RunIndex, content: Content, wanted: str) -> RolloutFiles:
    """The files that a stage run read or made, by its id."""
    stage_run = find_stage_run(run_index, wanted)
    is_sampling = stage_run.name in _SAMPLING
    rollouts = stage_run.artifact("rollouts", among_inputs=not is_sampling)
    if rollouts is None:
        raise LockstepError(f"{stage_run.stage} neither samples nor learns from rollouts")
    path = content.locate(rollouts)
    if path is None:
        raise LockstepError(content.how_to_restore(rollouts))
    maker = stage_run if is_sampling else next(iter(run_index.makers(rollouts)), None)
    start = maker.artifact("policy", among_inputs=True) if maker else None
    policy = PurePosixPath(start.path).parent.name if start else None

    def located(role: str) -> Path | None:
        artifact = stage_run.artifact(role, among_inputs=True) or stage_run.artifact(
            role, among_inputs=False
        )
        return _located(content, artifact)

    return RolloutFiles(
        stage_run.stage,
        name_of(stage_run),
        policy,
        path,
        located("scores"),
        located("experience"),
        _tokenizer(root, policy),
        copies_of(root),
    )


def find_stage_run(run_index: RunIndex, wanted: str) -> StageRun:
    """The stage run with an id."""
    for stage_run in run_index.stage_runs:
        if stage_run.id == wanted:
            return stage_run
    raise LockstepError(
        f"no stage run has the id {wanted!r} in the records of this clone: open it from Lineage"
    )


def _located(content: Content, artifact: Artifact | None) -> Path | None:
    return content.locate(artifact) if artifact else None


def _path(role: str, key: str) -> str:
    stages = ("rollout", "score", "policy_update")
    templates = {name: path for stage in stages for name, path in STAGES[stage].outs.items()}
    return templates[role].format(key=key)


def _there(path: Path) -> Path | None:
    return path if path.is_file() else None


def _tokenizer(root: Path, policy: str | None) -> Path | None:
    """The tokenizer of whoever sampled. All policies of a clone have the same one, so that of
    another will do where this one has been pruned."""
    policies = root / "artifacts/policies"
    folders = [policies / name / "model" for name in (policy, "sft") if name]
    folders += [path.parent for path in sorted(policies.glob("*/model/tokenizer.json"))]
    return next((path for path in folders if (path / "tokenizer.json").is_file()), None)
