"""The graph, read through DVC's own index: there is no second copy of it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.errors import LockstepError


@dataclass(frozen=True)
class Node:
    """One stage and the stages it waits for."""

    address: str
    upstream: tuple[str, ...]


def open_repo(root: Path) -> Any:
    """DVC's repository, with its own errors turned into ours."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        return Repo(str(root))
    except DvcException as error:
        raise LockstepError(f"{root}: DVC cannot open this repository: {error}") from None


def stages_in_order(repo: Any) -> list[Any]:
    """DVC's stages, each after those it depends on."""
    from dvc.exceptions import DvcException
    from dvc.parsing.context import ContextError
    from dvc.repo.reproduce import plan_repro

    try:
        return list(plan_repro(repo.index.graph))
    except (DvcException, ContextError) as error:
        raise LockstepError(f"dvc.yaml: {error}") from None


def nodes_of(stages: list[Any], graph: Any) -> dict[str, Node]:
    """DVC's stages by address, each with the addresses of those right before it."""
    return {
        address_of(stage): Node(
            address_of(stage), tuple(sorted(address_of(up) for up in graph.successors(stage)))
        )
        for stage in stages
    }


def address_of(stage: Any) -> str:
    """A stage's name as dvc spells it at the root; DVC's own `addressing` is seen from here."""
    path = Path(os.path.relpath(stage.path, stage.repo.root_dir)).as_posix()
    name = getattr(stage, "name", None)
    return str(name) if name and path == "dvc.yaml" else f"{path}:{name}" if name else path


def read_graph(root: Path) -> dict[str, Node]:
    """Every stage, in topological order."""
    with open_repo(root) as repo:
        return nodes_of(stages_in_order(repo), repo.index.graph)


def restrict(nodes: dict[str, Node], targets: list[str]) -> dict[str, Node]:
    """The targets and all before them."""
    for target in targets:
        if target not in nodes:
            raise LockstepError(f"dvc.yaml has no stage {target!r}; it has {', '.join(nodes)}")
    needed: set[str] = set()
    queue = list(targets)
    while queue:
        address = queue.pop()
        if address not in needed:
            needed.add(address)
            queue += nodes[address].upstream
    return {address: node for address, node in nodes.items() if address in needed}
