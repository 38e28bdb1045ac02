"""All that the records say about a finished policy: what made it, from what, and how good it is.

Everything here is found by hash. An evaluation counts if it read these very bytes, and its numbers
are those of the file whose hash dvc.lock has. Nothing volatile is kept: asked again on another day,
a clone gives the same answer.
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
from pipelines.export.given import given
from pipelines.lineage.content import Content, Gone
from pipelines.lineage.evidence import Artifact, Evidence, gather
from pipelines.lineage.history import History
from pipelines.lineage.making import Making
from pipelines.lineage.target import Resolver, Target
from pipelines.lineage.tree import Tree, Way, grow

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
    making: Making
    files: Mapping[str, Path]
    """The files of its folder, by name, wherever they lie."""
    stages: tuple[Making, ...]
    """Everything that it was made by, the first first and the one that made it last."""
    given: tuple[Artifact, ...]
    """Data and models that were there before, and that were read."""
    params: Mapping[str, Any]
    """Of all these stages, by dotted name."""
    evaluation: Mapping[str, float]
    """On the held-out prompts; empty where it was not evaluated."""
    of_sft: Mapping[str, float]
    """The same of the SFT policy that it comes from."""
    data: Mapping[str, float]
    """What prepare counted."""
    sources: tuple[Mapping[str, Any], ...]
    """What became of the rows of each source, as prepare's report tells it."""
    base_card: Mapping[str, Any]
    """What the card of the base model says, such as its licence."""
    licences: Mapping[str, Path]
    """The base model's own files of this kind, by name, wherever they lie."""

    @property
    def commit(self) -> str | None:
        return self.making.commit

    @property
    def params_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.params, sort_keys=True).encode()).hexdigest()


def find_policy(repository: Repository, policy: str, revision: str | None = None) -> Provenance:
    """Everything about a finished policy; LockstepError where there is none, or its bytes are gone.

    `policy` is a name of the family (`iter_003`), or anything that `lockstep lineage` takes.
    """
    evidence, history = gather(repository), History(repository.root)
    resolver = Resolver(evidence, repository.root, history)
    target = _find(resolver, f"{revision}:" if revision else "", policy)
    making, artifact = target.making, target.artifact
    assert making is not None
    assert artifact is not None
    tree = grow(evidence, target, Way.UP)
    stages = _in_order(tree)
    content = Content(repository, evidence)
    read = _Metrics(repository, history)
    of_sft = next((m for m in stages if m.name == SFT), making)
    prepare = next((m for m in stages if m.name == "prepare"), None)
    base = _base(content, prepare)
    params = {key: value for stage in stages for key, value in sorted(stage.params.items())}
    return Provenance(
        policy=making.key or making.name,
        artifact=artifact,
        making=making,
        files=content.files(artifact),
        stages=tuple(stages),
        given=given(tree),
        params=params,
        evaluation=_evaluation(evidence, read, artifact),
        of_sft=_evaluation(evidence, read, _policy_of(of_sft)),
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
    if target.making is None or _policy_of(target.making) is None:
        raise LockstepError(f"{target.text} is no policy: name one, such as sft or iter_001")
    if target.artifact is None or target.artifact.path != _path_of(target.making):
        artifact = _policy_of(target.making)
        return Target(target.text, artifact, target.making, target.lock)
    return target


def _path_of(making: Making) -> str | None:
    found = [p for p in making.outs if p.startswith("artifacts/policies/") and p.endswith("/model")]
    return found[0] if found else None


def _policy_of(making: Making) -> Artifact | None:
    path = _path_of(making)
    return Artifact(path, making.outs[path]) if path else None


def _in_order(tree: Tree) -> list[Making]:
    """The makings of a tree, each after those that it read from."""
    order: dict[str, None] = {}

    def visit(node: str) -> None:
        for _, before in tree.next_to(node):
            if before not in order:
                visit(before)
        order[node] = None

    visit(tree.root)
    return [making for node in order if (making := tree.nodes[node].making)]


def _evaluation(
    evidence: Evidence, read: "_Metrics", policy: Artifact | None
) -> Mapping[str, float]:
    readers = evidence.readers(policy) if policy else []
    made = [m for m in readers if m.name.startswith("evaluate") and _is_about(m, policy)]
    return next(filter(None, map(read.of, made)), {})


def _is_about(making: Making, policy: Artifact | None) -> bool:
    """Whether it measured this policy, and did not merely compare another one with it."""
    assert policy is not None
    return policy.path == f"artifacts/policies/{making.key or SFT}/model"


def _sources(content: Content, prepare: Making | None) -> tuple[Mapping[str, Any], ...]:
    if prepare is None or DATA_REPORT not in prepare.outs:
        return ()
    path = content.locate(Artifact(DATA_REPORT, prepare.outs[DATA_REPORT]))
    return tuple(json.loads(path.read_text(encoding="utf-8"))["sources"]) if path else ()


def _base(content: Content, prepare: Making | None) -> Mapping[str, Path]:
    """The files of the base model; none where they are gone."""
    if prepare is None or BASE not in prepare.outs:
        return {}
    try:
        return content.files(Artifact(BASE, prepare.outs[BASE]))
    except Gone:
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
    """The numbers of a making, from the file whose hash it has."""

    def __init__(self, repository: Repository, history: History) -> None:
        self._root, self._history = repository.root, history

    def of(self, making: Making) -> Mapping[str, float]:
        path = next((path for path in making.outs if path.startswith("metrics/")), None)
        if path is None:
            return {}
        texts = [self._here(path), *(self._history.file(c, path) for c in making.commits)]
        for text in texts:
            if text and hashlib.md5(text.encode()).hexdigest() == making.outs[path]:
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
