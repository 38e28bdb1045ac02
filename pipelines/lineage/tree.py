"""The graph of makings above or below a target, by the hashes that passed between them.

A making is one node, however many ways lead to it. Data that nothing here made are nodes too, so
that every input ends somewhere. An edge goes from who made an artifact to who read it.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from pipelines.lineage.evidence import Artifact, Evidence
from pipelines.lineage.making import Making
from pipelines.lineage.target import Target


class Way(StrEnum):
    """Which way from the target."""

    UP = "up"
    """What it was made from."""
    DOWN = "down"
    """What was made from it."""


@dataclass(frozen=True)
class Node:
    """A making, or an artifact that was given."""

    id: str
    making: Making | None
    given: Artifact | None = None
    others: int = 0
    """How many more makings left the same bytes."""

    @property
    def label(self) -> str:
        if self.making is not None:
            return self.making.stage
        assert self.given is not None
        return self.given.path


@dataclass(frozen=True)
class Edge:
    """An artifact that one node made and another read."""

    maker: str
    reader: str
    artifact: Artifact


@dataclass
class Tree:
    """Nodes in the order in which they were reached, the target's first."""

    way: Way
    root: str
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    """Nodes beyond which there is more, left out by the depth."""

    def next_to(self, node: str) -> list[tuple[Edge, str]]:
        """The edges that lead on from a node, with where they lead."""
        return self._steps.get(node, [])

    @cached_property
    def _steps(self) -> dict[str, list[tuple[Edge, str]]]:
        found: dict[str, list[tuple[Edge, str]]] = defaultdict(list)
        for edge in self.edges:
            here, there = (edge.reader, edge.maker)[:: 1 if self.way is Way.UP else -1]
            found[here].append((edge, there))
        return found


def grow(evidence: Evidence, target: Target, way: Way, depth: int | None = None) -> Tree:
    """Everything above or below the target, to a depth if one is given."""
    root = _root(target)
    tree = Tree(way, root.id, {root.id: root})
    edges: dict[Edge, None] = {}
    queue = deque([(root, 0)])
    while queue:
        node, distance = queue.popleft()
        steps = _up(evidence, node, target) if way is Way.UP else _down(evidence, node, target)
        for artifact, other in steps:
            if depth is not None and distance >= depth:
                tree.cut.add(node.id)
                break
            if other.id not in tree.nodes:
                tree.nodes[other.id] = other
                queue.append((other, distance + 1))
            ends = (other.id, node.id) if way is Way.UP else (node.id, other.id)
            edges[Edge(*ends, artifact)] = None
    tree.edges = list(edges)
    return tree


def _root(target: Target) -> Node:
    if target.making is not None:
        return Node(target.making.id, target.making)
    assert target.artifact is not None
    return _given(target.artifact)


def _given(artifact: Artifact) -> Node:
    return Node(f"{artifact.path}:{artifact.hash}", None, artifact)


def _up(evidence: Evidence, node: Node, target: Target) -> list[tuple[Artifact, Node]]:
    making = node.making
    if making is None:
        return []
    lock = evidence.lock_of(making, target.lock)
    found = []
    for path, digest in making.inputs.items():
        artifact = Artifact(path, digest)
        makers = evidence.makers(artifact, lock)
        parts = [] if makers else evidence.inside(making, path)
        for part in [artifact] if makers or not parts else parts:
            known = evidence.makers(part, lock)
            other = Node(known[0].id, known[0], others=len(known) - 1) if known else _given(part)
            found.append((part, other))
    return found


def _down(evidence: Evidence, node: Node, target: Target) -> list[tuple[Artifact, Node]]:
    making = node.making
    if making is None:
        made = [node.given] if node.given else []
    elif making is target.making and target.artifact is not None:
        made = [target.artifact]
    else:
        made = [Artifact(path, digest) for path, digest in making.outs.items()]
    return [
        (artifact, Node(reader.id, reader))
        for artifact in made
        for reader in evidence.readers(artifact)
    ]


def as_json(tree: Tree) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""
    return {
        "direction": tree.way.value,
        "root": tree.root,
        "stages": [making_json(node) for node in tree.nodes.values()],
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


def making_json(node: Node) -> dict[str, Any]:
    """One node, with everything that is known of it."""
    making = node.making
    if making is None:
        assert node.given is not None
        return {"id": node.id, "stage": None, "path": node.given.path, "hash": node.given.hash}
    return {
        "id": node.id,
        "stage": making.stage,
        "params": dict(making.params),
        "inputs": dict(making.inputs),
        "outs": dict(making.outs),
        "code": {
            "commit": making.commit,
            "uncommitted": list(making.job.uncommitted) if making.job else None,
            "version": making.code_version,
            "files": dict(making.code),
        },
        "environment": dict(making.job.environment) if making.job else None,
        "job": making.job.as_json() if making.job else None,
        "other_jobs": [job.name for job in making.jobs[1:]],
        "recorded_in": list(making.commits),
        "in_workspace": making.in_workspace,
        "same_bytes_made_by_others": node.others,
    }
