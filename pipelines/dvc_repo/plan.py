"""What would run, what would be restored, and why: DVC's status of every stage, in words."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import refuse_special_files
from pipelines.dvc_repo.code_stage import CodeStage
from pipelines.dvc_repo.definitions import Definition, Unsupported, read_definitions
from pipelines.dvc_repo.graph import (
    address_of,
    connect,
    nodes_of,
    open_repo,
    refuse_lost_stages,
    restrict,
    stages_in_order,
)
from pipelines.dvc_repo.staleness import NEEDED_AGAIN, StageStatus, Workspace, name_of
from pipelines.identity.code import CODE_STAGE
from stages.contracts.params import Params


@dataclass(frozen=True)
class PlannedStage:
    address: str
    upstream: tuple[str, ...]
    """Without the stage that writes the code maps: what it would write is foreseen."""
    stale: bool
    reasons: list[str] = field(default_factory=list)
    cached: bool = False
    """Whether DVC's cache holds the outputs, so that nothing has to be computed."""


def make_plan(
    root: Path,
    targets: list[str] | None = None,
    params: Params | None = None,
    values: Mapping[str, Any] | None = None,
) -> list[PlannedStage]:
    """Every stage that the targets need, in order, with what is stale about it.

    `values`: what params.yaml would say instead of what it says.
    LockstepError where dvc.yaml lacks a stage that the params ask for, or DVC could not read what
    they name.
    """
    from dvc.lock import LockError
    from dvc.rwlock import RWLockFileCorruptedError

    logging.getLogger("dvc").setLevel(logging.ERROR)
    if params is not None:
        refuse_special_files(root, params)
    try:
        with open_repo(root) as repo, repo.lock:
            try:
                definitions = read_definitions(repo, values)
                if params is not None:
                    refuse_lost_stages(definitions, params)
                with _read_lock(repo, definitions):
                    return _plan(repo, definitions, targets, values=values)
            except Unsupported as error:
                if values is not None:
                    raise LockstepError(
                        f"only DVC itself can read this dvc.yaml ({error}), and only what is in "
                        "params.yaml: set the values there, then plan without -S"
                    ) from None
                return _plan_of_dvc(repo, targets, params)
    except (LockError, RWLockFileCorruptedError) as error:
        raise LockstepError(
            f"a stage is running, so DVC cannot tell what is stale ({error}); see `lockstep status`"
        ) from None


def current_plan(root: Path) -> list[PlannedStage]:
    """The plan of all stages as it is just now, whatever is running: for who only shows it."""
    logging.getLogger("dvc").setLevel(logging.ERROR)
    with open_repo(root) as repo:
        try:
            return _plan(repo, read_definitions(repo), None)
        except Unsupported:
            return make_plan(root)


def _read_lock(repo: Any, definitions: Mapping[str, Definition]) -> Any:
    """DVC's own lock of every output, to be read: nobody writes them."""
    from dvc.rwlock import rwlock

    paths = [str(Path(repo.root_dir, out.path)) for it in definitions.values() for out in it.outs]
    hardlink = repo.config["core"].get("hardlink_lock", False)
    return rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), paths, [], hardlink)


def _plan(
    repo: Any,
    definitions: Mapping[str, Definition],
    targets: list[str] | None,
    needed: frozenset[str] = frozenset(),
    values: Mapping[str, Any] | None = None,
) -> list[PlannedStage]:
    """`needed`: outputs that were pruned, and that a stage which will run reads."""
    nodes = connect(dict(definitions))
    if targets:
        nodes = restrict(nodes, targets)
    writer = definitions.get(CODE_STAGE)
    outs = [out.path for out in writer.outs] if writer else []
    code = CodeStage.of(Path(repo.root_dir), writer and writer.cmd, outs)
    workspace = Workspace.read(repo, code, needed, values)
    workspace.hash_paths({address: definitions[address] for address in nodes})
    planned: dict[str, PlannedStage] = {}
    made_again: set[str] = set()
    """Stages that will run for an output that was pruned: nothing after them changes by it."""
    for address, node in nodes.items():
        upstream = code.without(node.upstream)
        waits_for = [up for up in upstream if planned[up].stale and up not in made_again]
        stage = StageStatus(definitions[address], workspace)
        reasons = stage.reasons() or [f"after {up}" for up in waits_for]
        known = all(planned[up].cached for up in waits_for)
        cached = bool(reasons) and known and stage.restore()
        planned[address] = PlannedStage(address, upstream, bool(reasons), reasons, cached)
        if reasons and all(reason.endswith(NEEDED_AGAIN) for reason in reasons):
            made_again.add(address)
        if code.maps and address == CODE_STAGE:
            workspace.predict_code()
    reads = {
        path
        for address, stage in planned.items()
        if stage.stale and not stage.cached
        for path in definitions[address].deps
    }
    if more := reads & workspace.pruned.keys() - needed:
        return _plan(repo, definitions, targets, needed | more, values)
    return list(planned.values())


def _plan_of_dvc(
    repo: Any, targets: list[str] | None, params: Params | None = None
) -> list[PlannedStage]:
    """The same, asked of DVC stage by stage: slow, and blind behind the first that is restored."""
    stages = {address_of(stage): stage for stage in stages_in_order(repo)}
    if params is not None:
        refuse_lost_stages(stages, params)
    nodes = nodes_of(list(stages.values()), repo.index.graph)
    writer = stages.get(CODE_STAGE)
    outs = [out.def_path for out in writer.outs] if writer else []
    code = CodeStage.of(Path(repo.root_dir), writer and writer.cmd, outs)
    planned: dict[str, PlannedStage] = {}
    for address, node in (restrict(nodes, targets) if targets else nodes).items():
        upstream = code.without(node.upstream)
        waits_for = [up for up in upstream if planned[up].stale]
        stage = stages[address]
        reasons = _reasons(stage.status().get(stage.addressing, []), stage, code)
        cached = bool(reasons) and not waits_for and _in_run_cache(repo, stages[address])
        reasons = reasons or [f"after {up}" for up in waits_for]
        planned[address] = PlannedStage(address, upstream, bool(reasons), reasons, cached)
    return list(planned.values())


def _reasons(status: list[Any], stage: Any, code: CodeStage) -> list[str]:
    """DVC's status entries as short phrases; what has changed in the code, file by file."""
    never_ran = stage.outs and all(not out.hash_info for out in stage.outs)
    if never_ran:
        return ["has not run yet"]
    maps = {dep.def_path: dep.hash_info.value for dep in stage.deps if dep.def_path in code.maps}
    reasons = [reason for path, md5 in maps.items() for reason in code.reasons(path, md5)]
    for item in status:
        if isinstance(item, str):
            reasons.append(item)
            continue
        for kind, changes in item.items():
            what = "output" if "outs" in kind else "input"
            for path, change in changes.items():
                if isinstance(change, dict):
                    reasons += [f"param {key} {how}" for key, how in change.items()]
                elif path not in maps:
                    reasons.append(f"{name_of(path, what)} {path} {change}")
    return reasons


def _in_run_cache(repo: Any, stage: Any) -> bool:
    """Whether DVC would restore the outputs instead of computing them.

    DVC's own dry restore looks under the hashes that dvc.lock has, not under those of now.
    """
    from dvc.exceptions import DvcException
    from dvc.stage.cache import _can_hash

    try:
        if not stage.changed_stage() and not stage.changed_deps():
            return bool(_can_hash(stage) and stage.outs_cached())
        stage.save_deps()
        if not _can_hash(stage):
            return False
        found = repo.stage_cache._load(stage)
        if not found:
            return False
        return bool(repo.stage_cache._create_stage(found, wdir=stage.wdir).outs_cached())
    except (DvcException, OSError):  # an input may be missing, and a plan never fails for it
        return False
