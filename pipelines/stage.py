"""What dvc.yaml's commands run: fix a stage's identity, and have it driven to its end."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.console import Console
from pipelines.driver import Driver
from pipelines.errors import LockstepError
from pipelines.executors import make_executor
from pipelines.hashing import HashCache
from pipelines.invocation import Invocation, current_invocation
from pipelines.ledger import Entry, Ledger
from pipelines.params import load_params
from pipelines.profiles import ExecutorKind, load_profile, profile_name
from pipelines.publish import drop_recorded, recorded_outs
from pipelines.repository import Repository
from pipelines.slurm_script import Batch, batch_script
from pipelines.snapshot import take_snapshot, uncommitted
from pipelines.spec import make_spec
from stages.contracts.base import Processes
from stages.contracts.catalog import BoundStage, bind, bind_all
from stages.contracts.params import Params


def run_stage(address: str, chosen_profile: str | None = None) -> None:
    """Compute one stage, or find it computed, and publish its outputs into the workspace."""
    repository = Repository.find()
    order = make_order(repository, address, chosen_profile)
    Driver(
        repository=repository,
        entry=order.entry,
        executors=lru_cache(lambda kind: make_executor(kind, repository)),
        launch=order.launch,
        invocation=order.invocation,
        console=Console(),
        identity=lambda: _fingerprint(repository, address),
    ).run()


@dataclass(frozen=True)
class Order:
    """What is to be computed, and how."""

    entry: Entry
    launch: dict[str, Any]
    invocation: Invocation


def make_order(repository: Repository, address: str, chosen_profile: str | None) -> Order:
    """Fix a stage's identity, and find or make its entry in the ledger."""
    params = load_params(repository.root)
    bound = _bind(address, params)
    name = profile_name(chosen_profile)
    profile = load_profile(repository.root, name)
    make_executor(profile.executor, repository)
    resources = profile.resources(bound.stage.name)
    ledger = Ledger(repository.jobs)
    drop_recorded(repository.root, ledger)
    code = take_snapshot(repository)
    hashes = HashCache(repository.home / "hashes.json")
    spec = make_spec(repository.root, bound, hashes, code)
    hashes.save()
    invocation = current_invocation()
    info = {
        "invocation": invocation.as_json(),
        "git_commit": repository.git_commit(),
        "experiment": os.environ.get("DVC_EXP_NAME"),
        "title": f"{params.rl.algorithm} with {params.rl.reward}, seed {params.seed}",
    }
    entry = ledger.find_or_create(spec, info)
    launch = {
        "invocation": invocation.as_json(),
        "executor": profile.executor,
        "profile": name,
        "root": str(repository.root),
        "code": str(code),
        "git_commit": info["git_commit"],
        "git_diff": uncommitted(repository),
        "resources": resources.model_dump(mode="json"),
        "num_shards": resources.shards if bound.stage.processes is Processes.SHARDS else 1,
        "graph": _graph(repository.root, params, bound) if bound.stage.wants_graph else [],
    }
    return Order(entry, launch, invocation)


def _fingerprint(repository: Repository, address: str) -> str:
    """The identity of the stage as the workspace has it now; of one that is gone, nothing."""
    try:
        bound = _bind(address, load_params(repository.root))
        hashes = HashCache(repository.home / "hashes.json")
        return make_spec(repository.root, bound, hashes, repository.root).fingerprint
    except LockstepError:
        return ""


def render_stage(address: str, chosen_profile: str | None = None) -> str:
    """The job script of a stage, how to submit it by hand, and how to follow its logs."""
    repository = Repository.find()
    bound = _bind(address, load_params(repository.root))
    name = profile_name(chosen_profile)
    profile = load_profile(repository.root, name)
    if profile.executor is not ExecutorKind.SLURM:
        return f"# {bound.address}: profile {name} runs it on this machine, without a job script"
    folder = repository.jobs / bound.address / "dry-run"
    batch = Batch(
        stage=bound.address,
        folder=folder,
        resources=profile.resources(bound.stage.name),
        token="dry-run",
        code=repository.home / "code" / "dry-run",
    )
    return (
        f"{batch_script(batch)}\n# follow it with:  tail -F {folder}/*_log.out {folder}/*_log.err\n"
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
