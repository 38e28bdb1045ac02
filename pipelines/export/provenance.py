"""The provenance of a finished policy: what produced it, from what, and its evaluation.

Everything is looked up by hash. An evaluation counts if it read exactly these bytes, and its
numbers are those of the file whose hash dvc.lock has. Nothing volatile is included: the same clone
gives the same answer on any day.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.export.given_inputs import given_inputs
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content, MissingArtifact
from pipelines.lineage.history import file_at
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.target import Resolver, Target
from pipelines.lineage.tree import Direction, Tree, build_tree

BASE = "artifacts/base"
DATA_REPORT = "artifacts/data/report.json"
LICENCES = "LICENSE*"
SFT = "sft"


@dataclass(frozen=True)
class Provenance:
    """A policy and its history."""

    policy: str
    """Its name: `sft`, `iter_003`."""
    artifact: Artifact
    stage_run: StageRun
    files: Mapping[str, Path]
    """The files of its folder, by name, wherever they are stored."""
    stages: tuple[StageRun, ...]
    """All stage runs that led to it, in order; the one that produced it is last."""
    given: tuple[Artifact, ...]
    """Data and models that no stage produced and that were read."""
    params: Mapping[str, Any]
    """Of all these stages, by dotted name."""
    evaluation: Mapping[str, float]
    """On the held-out prompts; empty where it was not evaluated."""
    of_sft: Mapping[str, float]
    """The same for the SFT policy that it comes from."""
    data: Mapping[str, float]
    """What prepare counted."""
    sources: tuple[Mapping[str, Any], ...]
    """How many rows of each source were used or dropped, from prepare's report."""
    base_card: Mapping[str, Any]
    """The front matter of the base model's card, such as its licence."""
    licences: Mapping[str, Path]
    """The base model's licence files, by name, wherever they are stored."""

    @property
    def commit(self) -> str | None:
        return self.stage_run.commit

    @property
    def params_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.params, sort_keys=True).encode()).hexdigest()


def find_policy(repository: Repository, policy: str, revision: str | None = None) -> Provenance:
    """Everything about a finished policy; LockstepError where it or its files do not exist.

    `policy` is a policy's name (`iter_003`), or anything that `lockstep lineage` accepts.
    """
    run_index = gather(repository)
    resolver = Resolver(run_index, repository.root)
    target = _find(resolver, f"{revision}:" if revision else "", policy)
    stage_run, artifact = target.stage_run, target.artifact
    assert stage_run is not None
    assert artifact is not None
    tree = build_tree(run_index, target, Direction.UP)
    stages = _in_order(tree)
    content = Content(repository, run_index)
    of_sft = next((m for m in stages if m.name == SFT), stage_run)
    prepare = next((m for m in stages if m.name == "prepare"), None)
    base = _base(content, prepare)
    params = {key: value for stage in stages for key, value in sorted(stage.params.items())}
    return Provenance(
        policy=stage_run.key or stage_run.name,
        artifact=artifact,
        stage_run=stage_run,
        files=content.files(artifact),
        stages=tuple(stages),
        given=given_inputs(tree),
        params=params,
        evaluation=_evaluation(repository.root, run_index, artifact),
        of_sft=_evaluation(repository.root, run_index, _policy_of(of_sft)),
        data=_metrics(repository.root, prepare) if prepare else {},
        sources=_sources(content, prepare),
        base_card=_base_card(base),
        licences={name: path for name, path in base.items() if fnmatch(name, LICENCES)},
    )


def _find(resolver: Resolver, revision: str, policy: str) -> Target:
    known = f"{revision}policy@{policy}"
    try:
        target = resolver.find(known)
    except LockstepError as error:
        try:
            target = resolver.find(f"{revision}{policy}")
        except LockstepError:
            raise error from None
    if target.stage_run is None or _policy_of(target.stage_run) is None:
        raise LockstepError(f"{target.text} is not a policy: name one, such as sft or iter_001")
    return replace(target, artifact=_policy_of(target.stage_run))


def _policy_of(stage_run: StageRun) -> Artifact | None:
    for path, digest in stage_run.outs.items():
        if path.startswith("artifacts/policies/") and path.endswith("/model"):
            return Artifact(path, digest)
    return None


def _in_order(tree: Tree) -> list[StageRun]:
    """The stage runs of a tree in topological order."""
    order: dict[str, None] = {}

    def visit(node: str) -> None:
        for _, before in tree.next_to(node):
            if before not in order:
                visit(before)
        order[node] = None

    visit(tree.root)
    return [stage_run for node in order if (stage_run := tree.nodes[node].stage_run)]


def _evaluation(root: Path, run_index: RunIndex, policy: Artifact | None) -> Mapping[str, float]:
    if policy is None:
        return {}
    evaluations = (
        reader
        for reader in run_index.readers(policy)
        # Another policy's evaluation reads this one too, to compare with it.
        if reader.name.startswith("evaluate")
        and policy.path == f"artifacts/policies/{reader.key or SFT}/model"
    )
    return next(filter(None, (_metrics(root, each) for each in evaluations)), {})


def _sources(content: Content, prepare: StageRun | None) -> tuple[Mapping[str, Any], ...]:
    if prepare is None or DATA_REPORT not in prepare.outs:
        return ()
    path = content.locate(Artifact(DATA_REPORT, prepare.outs[DATA_REPORT]))
    return tuple(json.loads(path.read_text(encoding="utf-8"))["sources"]) if path else ()


def _base(content: Content, prepare: StageRun | None) -> Mapping[str, Path]:
    """The files of the base model; none where they are missing."""
    if prepare is None or BASE not in prepare.outs:
        return {}
    try:
        return content.files(Artifact(BASE, prepare.outs[BASE]))
    except MissingArtifact:
        return {}


def _base_card(base: Mapping[str, Path]) -> Mapping[str, Any]:
    card = base.get("README.md")
    if card is None:
        return {}
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        values = YAML(typ="safe").load(parts[1])
    except YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _metrics(root: Path, stage_run: StageRun) -> Mapping[str, float]:
    """The metrics of a stage run, from the file with the recorded hash."""
    path = next((path for path in stage_run.outs if path.startswith("metrics/")), None)
    if path is None:
        return {}
    here = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else None
    for text in chain([here], (file_at(root, commit, path) for commit in stage_run.commits)):
        if text and hashlib.md5(text.encode()).hexdigest() == stage_run.outs[path]:
            return {
                name: value
                for name, value in sorted(json.loads(text).items())
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
    return {}
