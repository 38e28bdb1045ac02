"""Which stages an invocation found up to date, as far as dvc.lock tells.

dvc.lock also has stages that are stale and were not reached, because something before them failed
or they were not asked for. A stage counts as up to date when its params are those of params.yaml,
what dvc.lock says it read is what dvc.lock says was made, and the same holds for the stages before
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.errors import LockstepError
from pipelines.lock_file import read_stages
from pipelines.params import load_params
from pipelines.publish import recorded_outs
from pipelines.strict_yaml import load_yaml
from stages.contracts.catalog import BoundStage, bind_all


@dataclass(frozen=True)
class UpToDate:
    """A stage that was not run because its outputs are there."""

    bound: BoundStage
    outs: dict[str, str]
    """Its outputs with their hashes, without its metrics."""


def up_to_date(root: Path, unfinished: set[str]) -> list[UpToDate]:
    """Every stage of the graph that dvc.lock vouches for, in the graph's order.

    `unfinished` names stages that were tried and did not end well.
    """
    try:
        nodes = bind_all(load_params(root))
        params = load_yaml(root / "params.yaml")
        lock = read_stages(root)
    except LockstepError:
        return []
    outs = recorded_outs(root)
    made = {path: (stage, digest) for stage in outs for path, digest in outs[stage].items()}
    current: dict[str, bool] = {}

    def is_current(stage: str) -> bool:
        if stage not in current:
            current[stage] = False  # a cycle cannot be, but must not hang either
            current[stage] = (
                stage in lock
                and stage not in unfinished
                and stage in outs
                and _same_params(lock[stage].get("params") or {}, params)
                and all(_is_made(dep) for dep in lock[stage].get("deps") or ())
            )
        return current[stage]

    def _is_made(dep: Mapping[str, Any]) -> bool:
        path = dep["path"]
        if path in made and made[path][1] != dep.get("md5"):
            return False
        near = (maker for out, (maker, _) in made.items() if _touch(path, out))
        return all(is_current(maker) for maker in near)

    return [
        UpToDate(node, {path: outs[node.address][path] for path in node.outs.values()})
        for node in nodes
        if is_current(node.address)
    ]


def _touch(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _same_params(recorded: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]) -> bool:
    values = recorded.get("params.yaml") or {}
    return all(_lookup(params, key) == value for key, value in values.items())


def _lookup(params: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        params = params.get(part) if isinstance(params, Mapping) else None
    return params
