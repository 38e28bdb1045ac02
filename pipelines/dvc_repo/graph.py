"""The graph: every stage and those it waits for, in the order of a plain `dvc repro`.

It follows from dvc.yaml alone. What that file's reader here does not know is left to DVC's index.
"""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import PARAMS_FILE
from pipelines.config.strict_yaml import load_yaml
from pipelines.dvc_repo.definitions import Definition, Unsupported, read_definitions
from pipelines.dvc_repo.lock_state import lookup
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params

_READ = re.compile(r"\$\{([\w.]+)\}")
_OF_FOREACH = ("key", "item")
_MISSING = object()


@dataclass(frozen=True)
class Node:
    address: str
    upstream: tuple[str, ...]


def open_repo(root: Path) -> Any:
    """DVC's repository, with its own errors turned into ours."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    # Its bars, one a folder that it hashes, would flicker by the thousand on a terminal.
    logging.getLogger("dvc.progress").setLevel(logging.CRITICAL)
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
        root = Path(repo.root_dir)
        if missing := _missing_params(root):
            raise LockstepError(
                f"{root / PARAMS_FILE}: {', '.join(missing)} missing, which dvc.yaml reads: add "
                "what docs/params.md says, or bring the file back with `git checkout params.yaml`"
            ) from None
        raise LockstepError(f"dvc.yaml: {error}") from None


def refuse_lost_stages(stages: Iterable[str], params: Params) -> None:
    """LockstepError where dvc.yaml lacks a stage: what it makes would count as up to date.

    A graph with stages of its own, and none of those, is another one: nothing of it is lost.
    """
    there = set(stages)
    wanted = [bound.address for bound in bind_all(params)]
    lost = [address for address in wanted if address not in there]
    if lost and (lost != wanted or not there):
        raise LockstepError(
            f"dvc.yaml has no stage {', '.join(lost)}, which params.yaml asks for: bring it back, "
            "as `git checkout dvc.yaml` does"
        )


def _missing_params(root: Path) -> list[str]:
    read = dict.fromkeys(_READ.findall((root / "dvc.yaml").read_text(encoding="utf-8")))
    params = load_yaml(root / PARAMS_FILE)
    return [
        key
        for key in read
        if key.split(".")[0] not in _OF_FOREACH and lookup(params, key, _MISSING) is _MISSING
    ]


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
        return nodes_in_order(repo)


def nodes_in_order(repo: Any) -> dict[str, Node]:
    """Every stage by address, each after those it waits for."""
    try:
        return connect(read_definitions(repo))
    except Unsupported:
        return nodes_of(stages_in_order(repo), repo.index.graph)


def connect(definitions: dict[str, Definition]) -> dict[str, Node]:
    """The stages in DVC's order; Unsupported where DVC would refuse them."""
    makers: Any = _makers(definitions)
    before: dict[str, dict[str, None]] = {}
    known: dict[str, list[str]] = {}
    for address, definition in definitions.items():
        before[address] = {}
        for path in definition.deps:
            if path not in known:
                known[path] = _overlapping(makers, path)
            before[address] |= dict.fromkeys(known[path])
    return {
        address: Node(address, tuple(sorted(before[address]))) for address in _postorder(before)
    }


def _makers(definitions: dict[str, Definition]) -> Any:
    """The address of the stage that makes a path, found by the path's parts."""
    from pygtrie import Trie

    makers = Trie()
    for address, definition in definitions.items():
        for out in definition.outs:
            parts = Path(out.path).parts
            if parts in makers or makers.has_subtrie(parts) or makers.shortest_prefix(parts):
                raise Unsupported(f"outputs overlap at {out.path}")
            makers[parts] = address
    return makers


def _overlapping(makers: Any, path: str) -> list[str]:
    """Who makes the path, a folder around it or something in it."""
    parts = Path(path).parts
    found = [item.value for item in makers.prefixes(parts)]
    return found + (makers.values(prefix=parts) if makers.has_subtrie(parts) else [])


def _postorder(before: dict[str, dict[str, None]]) -> list[str]:
    """Depth first: each stage right after those before it, as DVC goes through them."""
    done: dict[str, None] = {}
    for start in before:
        path = {start: iter(before[start])} if start not in done else {}
        while path:
            address, left = next(reversed(path.items()))
            following = next((up for up in left if up not in done), None)
            if following is None:
                del path[address]
                done[address] = None
            elif following in path:
                raise Unsupported(f"{following} waits for itself")
            else:
                path[following] = iter(before[following])
    return list(done)


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
