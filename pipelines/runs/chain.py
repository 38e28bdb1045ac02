"""`lockstep run --chain`: the whole stale plan handed to Slurm at once, with nobody left to wait.

Each stage is a job that starts when those before it have ended, and then asks how
(pipelines/slurm/successor.py). What the links compute lands in the ledger as always, so that a last
small job, or the next command of any kind, finds it there and has DVC record it.
"""

import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind, Profile
from pipelines.driver.executors import make_executor
from pipelines.driver.orphans import live_attempts
from pipelines.driver.stage import describe_launch
from pipelines.dvc_repo.plan import PlannedStage
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.record import Origin
from pipelines.slurm.link import RECORDER, LinkOrder, waiting_links
from pipelines.slurm.queue import SlurmSilent
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.submit import just_wait, submit_batches
from stages.contracts.catalog import BoundStage, bind, bind_all
from stages.contracts.params import Params


def submit_chain(
    repository: Repository,
    profile: Profile,
    profile_name: str,
    plan: list[PlannedStage],
    console: Console,
) -> None:
    """Submit every stale stage, and a last job that records the results."""
    if profile.executor is not ExecutorKind.SLURM:
        raise LockstepError(
            f"profile {profile_name} has `executor: {profile.executor}`; --chain needs Slurm"
        )
    make_executor(profile.executor, repository)
    params = load_params(repository.root)
    stale = [stage for stage in plan if stage.stale]
    if not stale:
        console.line("nothing to do: all that was left is recorded now")
        return
    live = live_attempts(repository)
    queued = list(waiting_links(repository))
    busy = queued or [stage.address for stage in stale if stage.address in live]
    if busy:
        raise LockstepError(
            f"jobs of {', '.join(busy)} are live already; one chain at a time waits in a clone; "
            "`lockstep status` shows them, `lockstep cancel` ends them, `lockstep run` waits"
        )
    chain = _lay_out(repository, params, {stage.address for stage in stale})
    code = take_snapshot(repository)
    jobs: dict[str, list[str]] = {}
    try:
        for stage in stale:
            bound = bind(stage.address, params)
            origin, launch = _stage_link(repository, chain, bound, params, profile_name, code)
            before = tuple(up for up in stage.upstream if up in jobs)
            order = LinkOrder(stage.address, repository.root, origin, before)
            _submit(repository, chain, order, launch, jobs)
            waits = f", after {', '.join(before)}" if before else ""
            console.line(f"{stage.address}: job {','.join(jobs[stage.address])}{waits}")
        last = LinkOrder(RECORDER, repository.root, origin, tuple(jobs))
        _submit(repository, chain, last, _recorder(launch, profile), jobs)
    except BaseException:
        # Half a chain is of no use to anybody.
        with suppress(SlurmSilent):
            Scheduler(repository).cancel([job for numbers in jobs.values() for job in numbers])
        shutil.rmtree(chain, ignore_errors=True)
        raise
    last_job = jobs[RECORDER][0]
    console.line(
        f"{len(stale)} stages in the queue; job {last_job} records what they make into DVC, "
        "and so does the next `lockstep run` or `lockstep record`. See `lockstep status`"
    )


def _lay_out(repository: Repository, params: Params, stale: set[str]) -> Path:
    """A workspace for the chain, with what is up to date and what no stage makes."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    chain = repository.home / "chains" / name
    workspace = chain / "workspace"
    workspace.mkdir(parents=True)
    shutil.copy2(repository.root / "params.yaml", chain / "params.yaml")
    nodes = bind_all(params)
    made = {path for node in nodes for path in (*node.outs.values(), node.metrics)}
    for node in nodes:
        if node.address not in stale:
            for path in (*node.outs.values(), node.metrics):
                if (repository.root / path).exists():
                    atomic.link_tree(repository.root / path, workspace / path)
        for path in node.inputs.values():
            outside = not any(out == path or out.startswith(f"{path}/") for out in made)
            if outside and (repository.root / path).exists() and not (workspace / path).exists():
                (workspace / path).parent.mkdir(parents=True, exist_ok=True)
                (workspace / path).symlink_to(repository.root / path)
    return chain


def _submit(
    repository: Repository,
    chain: Path,
    order: LinkOrder,
    launch: Launch,
    jobs: dict[str, list[str]],
) -> None:
    """Submit a link behind the jobs that it needs, and note its own."""
    attempt = Attempt(chain / "links" / order.stage)
    attempt.folder.mkdir(parents=True)
    attempt.write(launch)
    files.write(attempt.folder / "link.json", order)
    behind = [job for stage in order.upstream for job in jobs[stage]]
    submitted = submit_batches(
        Scheduler(repository),
        order.stage,
        attempt.folder,
        launch,
        behind=behind,
        pause=just_wait,
    )
    attempt.write(submitted)
    jobs[order.stage] = list(submitted.jobs)


def _stage_link(
    repository: Repository, chain: Path, bound: BoundStage, params: Params, profile: str, code: Path
) -> tuple[Origin, Launch]:
    """Who asks for a stage, and how it runs in the chain."""
    origin, launch = describe_launch(repository, params, bound, profile, code)
    shards = tuple(range(launch.num_shards)) if launch.num_shards > 1 else None
    return origin, replace(launch, root=chain / "workspace", time=time.time(), shards=shards)


def _recorder(launch: Launch, profile: Profile) -> Launch:
    """The last job: it runs whether all went well or not, for what did go well."""
    modest = profile.resources("report").model_copy(
        update={
            "nodes": 1,
            "tasks_per_node": 1,
            "gpus_per_node": 0,
            "gres": None,
            # It needs DVC, as this command does, and nothing that a stage needs.
            "python": None,
            "container": None,
        }
    )
    return replace(
        launch,
        root=launch.clone,
        resources=modest,
        num_shards=1,
        shards=None,
        module="pipelines.runs.recorder",
    )
