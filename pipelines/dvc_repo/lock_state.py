"""Which stages dvc.lock vouches for, as far as it and params.yaml tell.

dvc.lock also has stages that are stale: they were not reached yet, because something before them
runs, failed or was not asked for. A stage is current when its params are those of params.yaml, what
it read is what dvc.lock says was made, and the same holds for the stages before it. Nothing is
hashed, so it can be asked often, and while DVC holds its locks; that code or data changed is for
the plan to see.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any


def current_stages(
    lock: Mapping[str, Any], params: Mapping[str, Any], unfinished: Collection[str] = ()
) -> set[str]:
    """The stages of dvc.lock that are current; `unfinished` were tried and did not end well."""
    made: dict[str, str] = {}
    maker: dict[str, str] = {}
    inside: dict[str, list[str]] = defaultdict(list)
    for stage, values in lock.items():
        for out in values.get("outs") or ():
            if "md5" in out:
                made[out["path"]] = out["md5"]
            maker[out["path"]] = stage
            for folder in PurePosixPath(out["path"]).parents:
                inside[str(folder)].append(stage)

    @cache
    def makers_of(path: str) -> frozenset[str]:
        around = (str(folder) for folder in PurePosixPath(path).parents)
        found = [maker[place] for place in (path, *around) if place in maker]
        return frozenset([*found, *inside.get(path, ())])

    followers: dict[str, set[str]] = defaultdict(set)
    stale: dict[str, None] = {}
    for stage, values in lock.items():
        deps = values.get("deps") or ()
        if (
            stage in unfinished
            or not _same_params(values.get("params") or {}, params)
            or any(made.get(dep["path"], dep.get("md5")) != dep.get("md5") for dep in deps)
        ):
            stale[stage] = None
        for dep in deps:
            for before in makers_of(dep["path"]):
                followers[before].add(stage)
    queue = list(stale)
    while queue:
        new = followers[queue.pop()] - stale.keys()
        stale |= dict.fromkeys(new)
        queue += new
    return lock.keys() - stale.keys()


def _same_params(recorded: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]) -> bool:
    values = recorded.get("params.yaml") or {}
    return all(lookup(params, key) == value for key, value in values.items())


def lookup(params: Any, dotted: str, missing: Any = None) -> Any:
    """The value of params.yaml at a dotted key."""
    for part in dotted.split("."):
        params = params.get(part, missing) if isinstance(params, Mapping) else missing
    return params
