"""What dvc.yaml's commands run: fix a stage's identity, and have it driven to its end."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.memory import refuse_what_cannot_fit
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind, load_profile, processes_of
from pipelines.driver.driver import Driver
from pipelines.driver.dvc_process import ONLY_RESTORE
from pipelines.driver.executors import make_executor
from pipelines.driver.upkeep import before_a_stage
from pipelines.identity.code import code_map, code_version, version_of
from pipelines.identity.hashing import HashCache
from pipelines.identity.map_files import refuse_other_map
from pipelines.identity.snapshot import take_snapshot, uncommitted
from pipelines.identity.spec import make_spec
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.invocation import Invocation, current_invocation
from pipelines.ledger.launch import Launch
from pipelines.ledger.publish import recorded_outs
from pipelines.ledger.record import Origin
from pipelines.ledger.state import State
from pipelines.ledger.upstream import upstream_graph
from pipelines.slurm.link import wait_for_link
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import batch_script
from pipelines.slurm.submit import missing_shards, slurm_batches
from pipelines.tracking.health import Health
from stages.contracts.base import Processes
from stages.contracts.catalog import BoundStage, bind
from stages.contracts.params import Params


def run_stage(address: str, chosen_profile: str | None) -> None:
    """Compute one stage, or find it computed, and publish its outputs into the workspace."""
    if os.environ.get(ONLY_RESTORE):
        raise LockstepError(f"{address}: DVC's cache does not have its outputs after all")
    repository, console = Repository.find(), Console()
    wait_for_link(repository, address, console)
    make_driver(repository, address, chosen_profile, console).run()


def make_driver(
    repository: Repository, address: str, chosen_profile: str | None, console: Console
) -> Driver:
    """Fix the stage's identity, find or make its entry in the ledger, and say how it would run."""
    profile = load_profile(repository.root, profile_name(chosen_profile))
    executors = lru_cache(lambda kind: make_executor(kind, repository))
    executors(profile.executor)
    entry, launch = make_order(repository, address, chosen_profile)
    return Driver(
        repository=repository,
        entry=entry,
        executors=executors,
        launch=launch,
        invocation=current_invocation(),
        console=console,
        identity=lambda: fingerprint(repository, address),
        health=Health(repository.root),
    )


def make_order(
    repository: Repository, address: str, chosen_profile: str | None
) -> tuple[Entry, Launch]:
    """What is to be computed, as an entry of the ledger, and how."""
    params = load_params(repository.root)
    bound = bind_stage(address, params)
    ledger = Ledger(repository.jobs)
    before_a_stage(repository, Console().line)
    copy = take_snapshot(repository)
    code = code_map(copy, bound.stage.module, repository.home)
    refuse_other_map(repository.root, address, bound.stage.module, code)
    hashes = HashCache(repository.home / "hashes.json")
    spec = make_spec(repository.root, bound, hashes, version_of(code))
    hashes.save()
    origin, launch = describe_launch(repository, params, bound, profile_name(chosen_profile), copy)
    if bound.stage.wants_graph:
        graph = upstream_graph(recorded_outs(repository.root), params, bound)
        launch = replace(launch, graph=tuple(graph))
    return ledger.find_or_create(spec, origin), launch


def describe_launch(
    repository: Repository, params: Params, bound: BoundStage, profile: str, code: Path
) -> tuple[Origin, Launch]:
    """Who asks for a stage and from what, and how it shall run."""
    origin = describe_command(repository, params, current_invocation())
    loaded = load_profile(repository.root, profile)
    resources = loaded.resources(bound.stage.name)
    addresses = [bound.address]
    for warning in refuse_what_cannot_fit(repository.root, params, profile, loaded, addresses):
        Console().line(f"warning: {warning}")
    on_slurm = loaded.executor is ExecutorKind.SLURM
    in_shards = on_slurm and processes_of(bound.stage, resources) is Processes.SHARDS
    launch = Launch(
        invocation=origin.invocation,
        user=os.getuid(),
        executor=loaded.executor,
        profile=profile,
        clone=repository.root,
        root=repository.root,
        code=code,
        git_commit=origin.git_commit,
        git_diff=uncommitted(repository),
        resources=resources,
        num_shards=resources.shards if in_shards else 1,
    )
    return origin, launch


def describe_command(repository: Repository, params: Params, invocation: Invocation) -> Origin:
    """Who asks, and from what: what MLflow's run of the command says about it."""
    return Origin(
        invocation=invocation,
        git_commit=repository.git_commit(),
        experiment=os.environ.get("DVC_EXP_NAME"),
        title=f"{params.rl.algorithm} · {params.rl.reward} · seed {params.seed}",
    )


def fingerprint(repository: Repository, address: str) -> str:
    """The identity of a stage as the workspace has it now; of one that is gone, nothing."""
    try:
        bound = bind_stage(address, load_params(repository.root))
        hashes = HashCache(repository.home / "hashes.json")
        code = code_version(repository.root, bound.stage.module, repository.home)
        return make_spec(repository.root, bound, hashes, code).fingerprint
    except LockstepError:
        return ""


def render_stage(address: str, chosen_profile: str | None) -> str:
    """The job script of a stage, how to submit it by hand, and how to follow its logs.

    Where the inputs are there, all that the script needs is written down, so that submitted by hand
    it computes the stage, and the next command finds what it made.
    """
    repository = Repository.find()
    params = load_params(repository.root)
    bound = bind_stage(address, params)
    name = profile_name(chosen_profile)
    if load_profile(repository.root, name).executor is not ExecutorKind.SLURM:
        return f"# {address}: profile {name} runs it on this machine, without a job script"
    try:
        folder, token, by_hand = _prepare(repository, address, name)
    except LockstepError as error:
        folder, token = repository.jobs / address / "dry-run" / "attempts" / "001", "dry-run"
        _, launch = describe_launch(repository, params, bound, name, repository.home / "code")
        by_hand = f"not yet: {error}"
    else:
        launch = Attempt(folder).launched
    if launch.num_shards > 1 and launch.shards is None:
        launch = replace(launch, shards=tuple(range(launch.num_shards)))
    scripts = [batch_script(batch) for batch in slurm_batches(address, folder, token, launch)]
    return "\n".join(
        [
            *scripts,
            f"# submit it by hand:  {by_hand}",
            f"# follow it:          tail -F {folder}/*_log.out {folder}/*_log.err",
            "",
        ]
    )


def _prepare(repository: Repository, address: str, profile: str) -> tuple[Path, str, str]:
    """Write an attempt down without submitting it: its folder, its token, and how to submit it."""
    entry, launch = make_order(repository, address, profile)
    if shutil.which("squeue"):
        # Somebody may have submitted by hand what an earlier dry run has written down.
        Scheduler(repository).refresh(now=True)
    if entry.state().alive:
        jobs = entry.current.jobs if entry.current else []
        raise LockstepError(f"its job {','.join(jobs)} runs already")
    if entry.state() in (State.COMPLETED, State.PUBLISHED):
        raise LockstepError("it is finished; `lockstep record` has DVC record it")
    launch = replace(launch, prepared=True)
    attempt = entry.new_attempt(launch)
    token = Scheduler(repository).register(attempt.folder)
    launch = replace(launch, token=token, shards=missing_shards(entry, launch))
    attempt.write(launch)
    scripts = []
    for number, batch in enumerate(slurm_batches(address, attempt.folder, token, launch)):
        path = attempt.folder / f"submission{number or ''}.sh"
        atomic.write_text(path, batch_script(batch))
        scripts.append(shlex.quote(str(path)))
    return attempt.folder, token, _by_hand(scripts, launch.resources.array_parallelism)


def _by_hand(scripts: Sequence[str], parallelism: int) -> str:
    """The commands that submit these scripts; of so many arrays at once, the others wait."""
    if len(scripts) <= parallelism:
        return " && ".join(f"sbatch {script}" for script in scripts)
    waits = ["", *(f"--dependency=afterany:$job{i} " for i in range(len(scripts)))]
    return " && ".join(
        f"job{i}=$(sbatch --parsable {waits[max(i - parallelism + 1, 0)]}{script})"
        for i, script in enumerate(scripts)
    )


def bind_stage(address: str, params: Params) -> BoundStage:
    try:
        return bind(address, params)
    except ValueError as error:
        raise LockstepError(str(error)) from None
