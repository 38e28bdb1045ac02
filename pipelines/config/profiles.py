"""slurm_profiles/*.yaml: where and with which resources a stage runs. Nothing here is hashed.

A profile has defaults and overrides for single stages. It is chosen by `--profile NAME` or
LOCKSTEP_PROFILE; without either it is `local`.
"""

import difflib
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from pipelines.base.errors import LockstepError
from pipelines.config.notify import Notify
from pipelines.config.preflight import SIZE, Preflight
from pipelines.config.slurm_flags import Flags, Line, StepFlag, Words
from pipelines.config.stage_in import StageIn
from pipelines.config.strict_yaml import load_model
from stages.contracts.base import Processes, Section, Stage
from stages.contracts.catalog import STAGES
from stages.contracts.evaluate import EVALUATIONS
from stages.contracts.online import ONLINE
from stages.contracts.rollout import ROLLOUT
from stages.contracts.sharding import Offload, Sharding

SAMPLING = (ROLLOUT.name, ONLINE.name, *EVALUATIONS)
"""The stages that have a generator."""
EARLIEST_SIGNAL_S = 60
"""How much earlier than requested Slurm may send a job its signal."""


class MemoryCheck(StrEnum):
    """What happens to a stage that needs more memory than the profile gives, by the estimate."""

    REFUSE = "refuse"
    WARN = "warn"
    OFF = "off"


class ExecutorKind(StrEnum):
    """Who runs the job."""

    LOCAL = "local"
    DEBUG = "debug"
    SLURM = "slurm"
    SESSION = "session"
    """Runs inside a session: set by `lockstep session up`, never by a profile."""


class Resources(Section):
    """The resources of one stage. In parentheses: the #SBATCH flag that a field becomes."""

    nodes: int = Field(default=1, ge=1)
    """Number of nodes (--nodes)."""
    tasks_per_node: int = Field(default=1, ge=1)
    """Processes per node (--ntasks-per-node)."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs per node (--gpus-per-node)."""
    cpus_per_task: int = Field(default=1, ge=1)
    """CPU cores, and so threads, per process (--cpus-per-task)."""
    memory: Line | None = None
    """Memory per node, such as 64G (--mem)."""
    gpu_memory: str | None = Field(default=None, pattern=SIZE)
    """Memory of one GPU, such as 80G; without it, no stage is refused for it (no flag)."""
    memory_check: MemoryCheck = Field(default=MemoryCheck.REFUSE, strict=False)
    """What to do with a stage that needs more memory than it is given: refuse, warn or off."""
    time_minutes: int = Field(default=24 * 60, ge=1)
    """Time limit of the job, in minutes (--time)."""
    partition: Line | None = None
    """Partition to submit to (--partition)."""
    account: Line | None = None
    """Account to charge (--account)."""
    qos: Line | None = None
    """Quality of service (--qos)."""
    constraint: Line | None = None
    """Required node features (--constraint)."""
    exclude: Line | None = None
    """Nodes to exclude (--exclude)."""
    reservation: Line | None = None
    """Reservation to run in (--reservation)."""
    gres: Line | None = None
    """Generic resources such as gpu:h200:8, where --gpus-per-node is not supported (--gres)."""
    licenses: Line | None = None
    """Licences that the job takes, such as matlab:2 (--licenses)."""
    switches: Line | None = Field(default=None, pattern=r"^\d+(@\S+)?$")
    """Most leaf switches between its nodes, and how long to wait for that: 1@60 (--switches)."""
    segment: int | None = Field(default=None, ge=1)
    """Nodes that lie together in a block of the topology/block plugin (--segment)."""
    shards: int = Field(default=1, ge=1)
    """Array tasks that split the work of rollout, score or reference_logprobs (--array)."""
    array_parallelism: int = Field(default=16, ge=1)
    """Maximum number of array tasks that run at once (the % in --array)."""
    requeues: int = Field(default=3, ge=0)
    """Maximum restarts after preemption, time limit or node failure."""
    requeue: bool = True
    """Whether a restart is the same job, put back into the queue (--requeue), or a new one."""
    signal_lead_seconds: int = Field(default=90, ge=1)
    """Seconds before the time limit at which the stage is signalled to save (--signal)."""
    setup: list[str] = Field(default_factory=list)
    """Shell commands before the stage (modules, venv); a failing one fails the job (no flag)."""
    container: Words | None = None
    """Prefix of the job's command, such as `apptainer exec --nv image.sif` (no flag)."""
    srun: list[StepFlag] = Field(default_factory=list)
    """Flags of srun, which starts the processes: [--container-image=image.sqsh, --mpi=pmix]."""
    extra: Flags = Field(default_factory=dict)
    """Any other flag of sbatch, by its long name without dashes: {mail-type: END}."""
    python: Words | None = None
    """Python interpreter of the job; by default, the one that submits."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Torch device: cpu or cuda (no flag)."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Maximum tokens per forward pass; a longer sequence runs alone. Affects rounding (no flag)."""
    compile: bool = False
    """Whether to use torch.compile: about a minute slower to start, then faster (no flag)."""
    checkpoint_activations: bool = False
    """Activation checkpointing: recompute activations instead of storing them (no flag)."""
    sharding: Sharding = Field(default=Sharding.NONE, strict=False)
    """What ranks shard: none, zero1 (optimizer), zero2 (gradients), zero3/fsdp (all weights)."""
    offload: Offload = Field(default=Offload.NONE, strict=False)
    """What training keeps in host memory: none, optimizer (its moments), or all (zero3, fsdp)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor-parallel size of vLLM, over so many ranks if joined; only rounding (no flag)."""
    generator_memory: float = Field(default=0.9, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may use, for weights and KV cache (no flag)."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Sequence-parallel size, for long sequences (DeepSpeed Ulysses; no flag)."""
    samplers: int = Field(default=0, ge=0)
    """Number of ranks of online, the last ones, that only sample; the others learn (no flag)."""
    deterministic: bool = True
    """Use only deterministic GPU algorithms; an operation without one fails. CPUs always do."""
    checkpoint_seconds: float = Field(default=30.0, gt=0)
    """Seconds between checkpoints: the most work that a kill can lose (no flag)."""
    stage_in: StageIn | None = None
    """The node's own disk, between the job and the shared folder; see below (no flag)."""
    collective_seconds: float = Field(default=600.0, gt=0)
    """Timeout of collectives: seconds that ranks wait for one before ending the job (no flag)."""
    preflight: Preflight = Preflight()
    """What is checked of the nodes before a stage begins; see below."""


def bytes_of(memory: str | None) -> int:
    """As Slurm reads it: megabytes without a unit; 0 if not set or not valid."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (memory or "").upper())
    return int(match[1]) << 10 * (1 + "KMGT".index(match[2] or "M")) if match else 0


def processes_of(stage: Stage, resources: Resources) -> Processes:
    """How its processes work.

    A stage that only reads models has ranks where these are spread, and an evaluation always. Those
    of a rollout are ranks where its vLLM needs more GPUs than a node has.
    """
    several = resources.nodes * resources.tasks_per_node > 1
    if stage is ROLLOUT:
        spans = resources.tensor_parallel > max(1, resources.gpus_per_node)
        return Processes.TOGETHER if spans and resources.nodes > 1 else stage.processes
    whole = stage.processes is Processes.SHARDS and not resources.sharding.spreads_weights
    if stage.reads and several and not whole:
        return Processes.TOGETHER
    return stage.processes


def tensor_parallel_of(stage: Stage, resources: Resources) -> int:
    """GPUs that a stage's vLLM spans; of joined ranks, so many neighbours sample as one."""
    joined = processes_of(stage, resources) is Processes.TOGETHER
    samples = not joined or stage.name in SAMPLING
    return resources.tensor_parallel if samples else 1


def num_samplers(stage: Stage, resources: Resources) -> int:
    """Ranks of a stage that only sample."""
    return resources.samplers if stage is ONLINE else 0


def thread_variables(resources: Resources) -> dict[str, str]:
    """Environment variables, because numerical libraries read them when they are imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(resources.cpus_per_task))


ResourceOverrides = create_model(
    "ResourceOverrides",
    __base__=Section,
    **{
        # The same limits as in the defaults; a field that is not set is not overridden.
        name: (
            info.annotation,
            FieldInfo.merge_field_infos(info, default=None, default_factory=None),
        )
        for name, info in Resources.model_fields.items()
    },  # type: ignore[call-overload]
)


class Profile(Section):
    """One file of slurm_profiles/."""

    executor: ExecutorKind = Field(strict=False)
    """`local`: a separate process; `debug`: this process, breakpoints work; `slurm`: sbatch."""
    description: str = ""
    """The purpose of the profile, in one line."""
    for_model: str | None = Field(default=None, pattern=r"^\d+(\.\d+)?[MB]$")
    """The largest policy that the profile is for, in weights, such as 8B (no flag)."""
    parallel: int = Field(default=1, ge=1)
    """Maximum number of stages that `lockstep run` and the Prefect flow run at once (no flag)."""
    notify: Notify | None = None
    """Who is told when a stage fails, warns or ends; see below (no flag)."""
    defaults: Resources = Resources()
    """Resources of every stage."""
    stages: dict[str, ResourceOverrides] = Field(default_factory=dict)  # type: ignore[valid-type]
    """Overrides for single stages, by stage name without `@iteration`."""

    def resources(self, stage: str) -> Resources:
        """The defaults with this stage's overrides applied."""
        override = self.stages.get(stage)
        if override is None:
            return self.defaults
        changed: dict[str, Any] = override.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
        own = self.defaults.model_dump()
        if "preflight" in changed:
            # A section of its own: what the stage does not name there is as in the defaults.
            changed["preflight"] = {**own["preflight"], **changed["preflight"]}
        return Resources.model_validate({**own, **changed})


def load_profile(root: Path, name: str) -> Profile:
    """Read slurm_profiles/NAME.yaml strictly."""
    folder = root / "slurm_profiles"
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known) or 'none'}"
        raise LockstepError(f"{path}: unknown profile {name!r}; {hint}")
    profile = load_model(path, Profile)
    if profile.executor is ExecutorKind.SESSION:
        raise LockstepError(
            f"{path}: `executor` must be local, debug or slurm; to run its stages in a session, "
            f"use `lockstep session up --profile {name}`"
        )
    for stage in profile.stages:
        if stage not in STAGES:
            close = difflib.get_close_matches(stage, STAGES, n=1)
            hint = f"did you mean `stages.{close[0]}`?" if close else f"stages: {', '.join(STAGES)}"
            raise LockstepError(f"{path}: unknown key `stages.{stage}`; {hint}")
    for known_stage in STAGES.values():
        _check(path, profile, known_stage)
    return profile


def _check(path: Path, profile: Profile, stage: Stage) -> None:
    """Checks that concern several fields."""
    resources = profile.resources(stage.name)
    override = profile.stages.get(stage.name)
    key = f"stages.{stage.name}" if override else "defaults"
    wrong = ""
    if profile.executor is ExecutorKind.SLURM:
        if 60 * resources.time_minutes <= resources.signal_lead_seconds + EARLIEST_SIGNAL_S:
            wrong = (
                f"`time_minutes` {resources.time_minutes} leaves no time before the signal of "
                f"`signal_lead_seconds` {resources.signal_lead_seconds}, which Slurm may send "
                f"{EARLIEST_SIGNAL_S} s early: raise the first or lower the second"
            )
    elif resources.nodes * resources.tasks_per_node > 1:
        wrong = "without Slurm a stage is one process: set `nodes` and `tasks_per_node` to 1"
    named = getattr(override, "shards", None) or 1
    if named > 1 and stage.processes is not Processes.SHARDS:
        able = ", ".join(s.name for s in STAGES.values() if s.processes is Processes.SHARDS)
        wrong = f"`shards` {named}: {stage.name} cannot be sharded, only {able} can"
    joined = processes_of(stage, resources) is Processes.TOGETHER
    if joined and stage.reads and resources.shards > 1:
        wrong = (
            f"`shards` {resources.shards}: with `nodes` {resources.nodes}, `tasks_per_node` "
            f"{resources.tasks_per_node} and `sharding` {resources.sharding}, {stage.name} is one "
            "job of joined ranks: set `shards` to 1, or `sharding` to none"
        )
    if joined and stage is ROLLOUT and resources.shards > 1:
        wrong = (
            f"`shards` {resources.shards}: with `tensor_parallel` {resources.tensor_parallel} over "
            f"`nodes` {resources.nodes}, {stage.name} is one job of joined ranks: set `shards` to 1"
        )
    if resources.offload is Offload.ALL and not resources.sharding.spreads_weights:
        wrong = (
            f"`offload` all moves weights, but with `sharding` {resources.sharding} every rank "
            "needs all of them: set `sharding` to zero3 or fsdp, or `offload` to optimizer"
        )
    world, sharing = resources.nodes * resources.tasks_per_node, resources.sequence_parallel
    learning, counted = world, "`nodes` times `tasks_per_node`"
    if getattr(override, "samplers", None) and stage is not ONLINE:
        wrong = f"`samplers` {resources.samplers}: {stage.name} has none, only {ONLINE.name} has"
    if samplers := num_samplers(stage, resources):
        if samplers >= world:
            wrong = (
                f"`samplers` {samplers} of {world} ranks ({counted}) leave none to learn: lower "
                "`samplers`, or raise the number of ranks, which takes Slurm"
            )
        learning, counted = max(1, world - samplers), f"{counted}, less `samplers`"
    if sharing > 1 and stage.processes is Processes.TOGETHER and learning % sharing:
        wrong = (
            f"`sequence_parallel` {sharing} does not divide the number of ranks, {learning} "
            f"({counted})"
        )
    wrong = wrong or wrong_with_groups(stage, resources)
    if wrong:
        raise LockstepError(f"{path}: `{key}`: {wrong}")


def wrong_with_groups(stage: Stage, resources: Resources) -> str:
    """Why neighbouring ranks cannot sample as one, where they are to; empty if they can."""
    tasks, gpus = resources.tasks_per_node, resources.gpus_per_node
    joined = processes_of(stage, resources) is Processes.TOGETHER and resources.nodes * tasks > 1
    width = tensor_parallel_of(stage, resources)
    if not joined:
        return _wrong_alone(stage, resources, width)
    if width == 1:
        return ""
    world = resources.nodes * tasks
    if (tasks % width and width % tasks) or world % width:
        return (
            f"`tensor_parallel` {width} neither divides `tasks_per_node` {tasks} nor is that of "
            f"several nodes which divide `nodes` {resources.nodes}: so many neighbouring ranks of "
            f"{stage.name} sample as one, over their GPUs"
        )
    if resources.device.startswith("cuda") and 0 < gpus < tasks:
        return (
            f"`tensor_parallel` {width} takes a GPU for each rank, and `gpus_per_node` {gpus} is "
            f"less than `tasks_per_node` {tasks}: set them to the same, or `tensor_parallel` to 1"
        )
    if (samplers := num_samplers(stage, resources)) % width:
        return (
            f"`tensor_parallel` {width} does not divide `samplers` {samplers}, of which so many "
            "sample as one: set `samplers` to a multiple of it, or `tensor_parallel` to 1"
        )
    return ""


def _wrong_alone(stage: Stage, resources: Resources, width: int) -> str:
    """Why one process cannot sample over so many GPUs; empty if it can."""
    gpus = resources.gpus_per_node if resources.device.startswith("cuda") else 0
    if stage.name not in SAMPLING or not 0 < gpus < width:
        return ""
    return (
        f"`tensor_parallel` {width} is more than `gpus_per_node` {gpus}, and {stage.name} is one "
        "process, which has those of its node: raise `gpus_per_node`, lower `tensor_parallel`, or, "
        "for more GPUs than a node has, set `tasks_per_node` and `nodes`, for a process on each"
    )
