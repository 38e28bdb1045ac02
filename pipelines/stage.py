"""What dvc.yaml's commands run: fix a stage's identity, and have it driven to its end."""

import os
from pathlib import Path
from typing import Any

from pipelines.console import Console
from pipelines.driver import Driver
from pipelines.errors import LockstepError
from pipelines.executors import make_executor, render_sbatch
from pipelines.hashing import HashCache
from pipelines.invocation import current_invocation
from pipelines.ledger import Ledger
from pipelines.params import load_params
from pipelines.profiles import ExecutorKind, load_profile, profile_name
from pipelines.publish import drop_recorded, recorded_outs
from pipelines.repository import Repository
from pipelines.spec import make_spec
from stages.contracts.catalog import BoundStage, bind, bind_all
from stages.contracts.params import Params


def run_stage(address: str, chosen_profile: str | None = None) -> None:
    """Compute one stage, or find it computed, and publish its outputs into the workspace."""
    repository = Repository.find()
    params = load_params(repository.root)
    bound = _bind(address, params)
    name = profile_name(chosen_profile)
    profile = load_profile(repository.root, name)
    executor = make_executor(profile.executor)
    ledger = Ledger(repository.jobs)
    drop_recorded(repository.root, ledger)
    hashes = HashCache(repository.home / "hashes.json")
    spec = make_spec(repository.root, bound, hashes)
    hashes.save()
    invocation = current_invocation()
    info = {
        "invocation": invocation.as_json(),
        "git_commit": repository.git_commit(),
        "experiment": os.environ.get("DVC_EXP_NAME"),
        "title": f"{params.rl.algorithm} with {params.rl.reward}, seed {params.seed}",
    }
    launch = {
        "invocation": invocation.as_json(),
        "executor": profile.executor,
        "profile": name,
        "root": str(repository.root),
        "resources": profile.resources(bound.stage.name).model_dump(mode="json"),
        "graph": _graph(repository.root, params, bound) if bound.stage.wants_graph else [],
    }
    entry = ledger.find_or_create(spec, info)
    Driver(repository, entry, executor, launch, invocation, Console()).run()


def render_stage(address: str, chosen_profile: str | None = None) -> str:
    """The job script of a stage, and how to follow its logs."""
    repository = Repository.find()
    bound = _bind(address, load_params(repository.root))
    name = profile_name(chosen_profile)
    profile = load_profile(repository.root, name)
    if profile.executor is not ExecutorKind.SLURM:
        return f"# {bound.address}: profile {name} runs it on this machine, without a job script"
    folder = repository.jobs / bound.address / "dry-run"
    return (
        f"{render_sbatch(bound.address, folder, profile.resources(bound.stage.name))}\n"
        f"# follow it with:  tail -F {folder}/*_log.out {folder}/*_log.err\n"
    )


def _bind(address: str, params: Params) -> BoundStage:
    try:
        return bind(address, params)
    except ValueError as error:
        raise LockstepError(str(error)) from None


def _graph(root: Path, params: Params, bound: BoundStage) -> list[dict[str, Any]]:
    """The stage and all before it, with the hashes dvc.lock gives their outputs.

    Nothing else may be in it, nor the stage's own hash of an earlier run: its output would depend
    on what happened to run before.
    """
    recorded = {**recorded_outs(root), bound.address: {}}
    nodes = {node.address: node for node in bind_all(params)}
    maker = {
        path: node.address
        for node in nodes.values()
        for path in (*node.outs.values(), node.metrics)
    }
    graph: dict[str, dict[str, Any]] = {}
    queue = [bound.address]
    while queue:
        node = nodes[queue.pop()]
        if node.address in graph:
            continue
        deps = {
            maker[path]
            for needed in node.inputs.values()
            for path in maker
            if path == needed or path.startswith(f"{needed}/")
        }
        outs = {path: recorded.get(node.address, {}).get(path) for path in node.outs.values()}
        graph[node.address] = {"stage": node.address, "deps": sorted(deps), "outs": outs}
        queue += deps
    return [graph[address] for address in nodes if address in graph]
