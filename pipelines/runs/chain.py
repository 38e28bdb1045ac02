"""`lockstep run --chain`: the whole stale plan handed to Slurm at once, with nobody left to wait.

Each stage is a job that starts when those before it have ended well. One that fails takes those
after it out of the queue. What the links compute lands in the ledger as always, so that a last
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
from pipelines.driver.orphans import RECORDER, live_attempts
from pipelines.driver.stage import describe_launch
from pipelines.dvc_repo.plan import PlannedStage
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.slurm.link import LinkOrder, waiting_links
from pipelines.slurm.queue import SlurmSilent
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import Batch
from pipelines.slurm.submit import just_wait, submit_batch, submit_batches
from stages.contracts.catalog import bind, bind_all
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
            after = [job for up in stage.upstream for job in jobs.get(up, ())]
            attempt = _write_link(repository, chain, stage.address, params, profile_name, code)
            submitted = submit_batches(
                Scheduler(repository),
                stage.address,
                attempt.folder,
                attempt.launched,
                after=after,
                pause=just_wait,
            )
            attempt.write(submitted)
            jobs[stage.address] = list(submitted.jobs)
            numbers = ",".join(jobs[stage.address])
            before = [up for up in stage.upstream if up in jobs]
            waits = f", after {', '.join(before)}" if before else ""
            console.line(f"{stage.address}: job {numbers}{waits}")
        recorder = _submit_recorder(repository, chain, profile, profile_name, code, jobs)
    except BaseException:
        # Half a chain is of no use to anybody.
        with suppress(SlurmSilent):
            Scheduler(repository).cancel([job for numbers in jobs.values() for job in numbers])
        shutil.rmtree(chain, ignore_errors=True)
        raise
    console.line(
        f"{len(stale)} stages in the queue; job {recorder} records what they make into DVC, and so "
        "does the next `lockstep run` or `lockstep record`. See `lockstep status`"
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


def _write_link(
    repository: Repository, chain: Path, address: str, params: Params, profile: str, code: Path
) -> Attempt:
    folder = chain / "links" / address
    folder.mkdir(parents=True)
    bound = bind(address, params)
    origin, launch = describe_launch(repository, params, bound, profile, code)
    shards = tuple(range(launch.num_shards)) if launch.num_shards > 1 else None
    workspace = chain / "workspace"
    attempt = Attempt(folder)
    attempt.write(replace(launch, root=workspace, time=time.time(), shards=shards))
    files.write(folder / "link.json", LinkOrder(address, repository.root, origin))
    return attempt


def _submit_recorder(
    repository: Repository,
    chain: Path,
    profile: Profile,
    profile_name: str,
    code: Path,
    jobs: dict[str, list[str]],
) -> str:
    """The last job: it runs whether all went well or not, for what did go well."""
    folder = chain / "recorder"
    folder.mkdir()
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
    return submit_batch(
        Batch(
            stage=RECORDER,
            folder=folder,
            resources=modest,
            token=Scheduler(repository).new_token(),
            code=code,
            root=repository.root,
            behind=[job for numbers in jobs.values() for job in numbers],
            module="pipelines",
            arguments=["record"],
            variables={"LOCKSTEP_TRACKING": "off", "LOCKSTEP_PROFILE": profile_name},
        ),
        pause=just_wait,
    )
