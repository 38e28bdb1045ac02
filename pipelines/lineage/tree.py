"""The graph of stage runs upstream or downstream of a target, linked by artifact hashes.

A stage run is one node, however many paths lead to it. Given data, which no stage here produced,
are nodes too, so that every input has an origin. An edge goes from an artifact's producer to its
reader.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from pipelines.identity.spec import Artifact
from pipelines.lineage.naming import role_of
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import StageRun, short_hash
from pipelines.lineage.target import Target


class Direction(StrEnum):
    """Upstream or downstream of the target."""

    UP = "up"
    """What it was produced from."""
    DOWN = "down"
    """What was produced from it."""


@dataclass(frozen=True)
class Node:
    """A stage run, or an artifact that was given."""

    id: str
    stage_run: StageRun | None
    given: Artifact | None = None
    others: int = 0
    """How many more stage runs left the same bytes."""

    @property
    def label(self) -> str:
        if self.stage_run is not None:
            return self.stage_run.stage
        assert self.given is not None
        return self.given.path


@dataclass(frozen=True)
class Edge:
    """An artifact that one node produced and another read."""

    maker: str
    reader: str
    artifact: Artifact


@dataclass
class Tree:
    """Nodes in breadth-first order, the target's first."""

    direction: Direction
    root: str
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    """Nodes with further neighbours that the depth limit leaves out."""

    def label(self, edge: Edge) -> str:
        """The artifact as its reader's contract calls it, with a short hash."""
        reader = self.nodes[edge.reader].stage_run
        assert reader is not None
        role = role_of(reader.stage, edge.artifact.path, among_inputs=True)
        return f"{role} {short_hash(edge.artifact.hash)}"

    def next_to(self, node: str) -> list[tuple[Edge, str]]:
        """The edges that lead away from the root, with the node at their other end."""
        return self._steps.get(node, [])

    @cached_property
    def _steps(self) -> dict[str, list[tuple[Edge, str]]]:
        steps: dict[str, list[tuple[Edge, str]]] = defaultdict(list)
        for edge in self.edges:
            here, there = (edge.reader, edge.maker)[:: 1 if self.direction is Direction.UP else -1]
            steps[here].append((edge, there))
        return steps


def build_tree(
    run_index: RunIndex, target: Target, direction: Direction, depth: int | None = None
) -> Tree:
    """Everything upstream or downstream of the target, to a depth if one is given."""
    root = _root(target)
    tree = Tree(direction, root.id, {root.id: root})
    edges: dict[Edge, None] = {}
    queue = deque([(root, 0)])
    while queue:
        node, distance = queue.popleft()
        steps = (
            _up(run_index, node, target)
            if direction is Direction.UP
            else _down(run_index, node, target)
        )
        for artifact, other in steps:
            if depth is not None and distance >= depth:
                tree.cut.add(node.id)
                break
            if other.id not in tree.nodes:
                tree.nodes[other.id] = other
                queue.append((other, distance + 1))
            ends = (other.id, node.id) if direction is Direction.UP else (node.id, other.id)
            edges[Edge(*ends, artifact)] = None
    tree.edges = list(edges)
    return tree


def _root(target: Target) -> Node:
    if target.stage_run is not None:
        return Node(target.stage_run.id, target.stage_run)
    assert target.artifact is not None
    return _given(target.artifact)


def _given(artifact: Artifact) -> Node:
    return Node(f"{artifact.path}:{artifact.hash}", None, artifact)


def _up(run_index: RunIndex, node: Node, target: Target) -> list[tuple[Artifact, Node]]:
    stage_run = node.stage_run
    if stage_run is None:
        return []
    lock = run_index.lock_of(stage_run, target.lock)
    steps = []
    for path, digest in stage_run.inputs.items():
        artifact = Artifact(path, digest)
        makers = run_index.makers(artifact, lock)
        parts = [] if makers else run_index.inside(stage_run, path)
        for part in [artifact] if makers or not parts else parts:
            known = run_index.makers(part, lock)
            other = Node(known[0].id, known[0], others=len(known) - 1) if known else _given(part)
            steps.append((part, other))
    return steps


def _down(run_index: RunIndex, node: Node, target: Target) -> list[tuple[Artifact, Node]]:
    stage_run = node.stage_run
    if stage_run is None:
        made = [node.given] if node.given else []
    elif stage_run is target.stage_run and target.artifact is not None:
        made = [target.artifact]
    else:
        made = [Artifact(path, digest) for path, digest in stage_run.outs.items()]
    return [
        (artifact, Node(reader.id, reader))
        for artifact in made
        for reader in run_index.readers(artifact)
    ]


def as_json(tree: Tree) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""
    return {
        "direction": tree.direction.value,
        "root": tree.root,
        "stages": [stage_run_json(node) for node in tree.nodes.values()],
        "edges": [
            {
                "from": edge.maker,
                "to": edge.reader,
                "path": edge.artifact.path,
                "hash": edge.artifact.hash,
            }
            for edge in tree.edges
        ],
        "cut": sorted(tree.cut),
    }


def stage_run_json(node: Node) -> dict[str, Any]:
    """One node, with everything that is known about it."""
    stage_run = node.stage_run
    if stage_run is None:
        assert node.given is not None
        return {"id": node.id, "stage": None, "path": node.given.path, "hash": node.given.hash}
    return {
        "id": node.id,
        "stage": stage_run.stage,
        "params": dict(stage_run.params),
        "inputs": dict(stage_run.inputs),
        "outs": dict(stage_run.outs),
        "code": {
            "commit": stage_run.commit,
            "uncommitted": list(stage_run.job.uncommitted) if stage_run.job else None,
            "version": stage_run.code_version,
            "files": dict(stage_run.code),
        },
        "environment": dict(stage_run.job.environment) if stage_run.job else None,
        "job": stage_run.job.as_json() if stage_run.job else None,
        "other_jobs": [job.entry for job in stage_run.jobs[1:]],
        "recorded_in": list(stage_run.commits),
        "in_workspace": stage_run.in_workspace,
        "same_bytes_made_by_others": node.others,
    }
