"""The provenance of a finished policy: what produced it, from what, and its evaluation.

Everything is looked up by hash. An evaluation counts if it read exactly these bytes, and its
numbers are those of the file whose hash dvc.lock has. Nothing volatile is included: the same clone
gives the same answer on any day.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.export.given_inputs import given_inputs
from pipelines.lineage.content import Content, MissingArtifact
from pipelines.lineage.history import History
from pipelines.lineage.run_index import Artifact, RunIndex, gather
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
    run_index, history = gather(repository), History(repository.root)
    resolver = Resolver(run_index, repository.root, history)
    target = _find(resolver, f"{revision}:" if revision else "", policy)
    stage_run, artifact = target.stage_run, target.artifact
    assert stage_run is not None
    assert artifact is not None
    tree = build_tree(run_index, target, Direction.UP)
    stages = _in_order(tree)
    content = Content(repository, run_index)
    read = _Metrics(repository, history)
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
        evaluation=_evaluation(run_index, read, artifact),
        of_sft=_evaluation(run_index, read, _policy_of(of_sft)),
        data=read.of(prepare) if prepare else {},
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
    if target.artifact is None or target.artifact.path != _path_of(target.stage_run):
        artifact = _policy_of(target.stage_run)
        return Target(target.text, artifact, target.stage_run, target.lock)
    return target


def _path_of(stage_run: StageRun) -> str | None:
    found = [
        p for p in stage_run.outs if p.startswith("artifacts/policies/") and p.endswith("/model")
    ]
    return found[0] if found else None


def _policy_of(stage_run: StageRun) -> Artifact | None:
    path = _path_of(stage_run)
    return Artifact(path, stage_run.outs[path]) if path else None


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


def _evaluation(
    run_index: RunIndex, read: "_Metrics", policy: Artifact | None
) -> Mapping[str, float]:
    readers = run_index.readers(policy) if policy else []
    made = [m for m in readers if m.name.startswith("evaluate") and _is_about(m, policy)]
    return next(filter(None, map(read.of, made)), {})


def _is_about(stage_run: StageRun, policy: Artifact | None) -> bool:
    """Whether it evaluated this policy, rather than compared another one with it."""
    assert policy is not None
    return policy.path == f"artifacts/policies/{stage_run.key or SFT}/model"


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


class _Metrics:
    """The metrics of a stage run, from the file with the recorded hash."""

    def __init__(self, repository: Repository, history: History) -> None:
        self._root, self._history = repository.root, history

    def of(self, stage_run: StageRun) -> Mapping[str, float]:
        path = next((path for path in stage_run.outs if path.startswith("metrics/")), None)
        if path is None:
            return {}
        texts = [self._here(path), *(self._history.file(c, path) for c in stage_run.commits)]
        for text in texts:
            if text and hashlib.md5(text.encode()).hexdigest() == stage_run.outs[path]:
                values = json.loads(text)
                return {
                    name: value
                    for name, value in sorted(values.items())
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
        return {}

    def _here(self, path: str) -> str | None:
        file = self._root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None
