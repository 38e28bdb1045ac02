"""Which of a job's processes this is: its rank, its shard, and how often Slurm has started the job.

Slurm says so in the environment of each process; a job without Slurm has one process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipelines.config.profiles import Resources
from stages.contracts.base import Processes


@dataclass(frozen=True)
class Task:
    """One process of a job."""

    rank: int = 0
    """Among the processes that meet in collectives."""
    world: int = 1
    local_rank: int = 0
    shard: int = 0
    """Among the processes that each do a share of the work on their own."""
    num_shards: int = 1
    restart: int = 0
    """How often Slurm has started the job again."""
    job: str | None = None
    """Slurm's number for the job, or for the task of an array."""
    log: str = ""
    """How the names of this process's logs begin."""
    idle: bool = False
    """Whether the stage has nothing for this process to do."""

    @property
    def label(self) -> str:
        return f"{self.shard + self.rank:05}"

    @property
    def leads(self) -> bool:
        """Whether this process may write the outputs."""
        return self.rank == 0

    @property
    def reads_for_its_node(self) -> bool:
        """Whether this process checks the inputs: each that works alone; of ranks one a node."""
        return self.world == 1 or self.local_rank == 0

    def device(self, resources: Resources) -> str:
        """A GPU each, in turn: where a node has fewer than tasks, some have the same."""
        alone = self.job is None and self.world == 1
        if resources.device != "cuda" or alone:
            return resources.device
        return f"cuda:{self.local_rank % (resources.gpus_per_node or resources.tasks_per_node)}"

    def what(self) -> str:
        """Words for a message: nothing where there is only one process."""
        if self.world > 1:
            return f"rank {self.rank} of {self.world}"
        return f"shard {self.shard} of {self.num_shards}" if self.num_shards > 1 else ""


def find_task(
    processes: Processes,
    num_array_tasks: int,
    first_shard: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> Task:
    """This process's place, from Slurm's variables."""
    if "SLURM_PROCID" not in environment:
        return Task()
    number, count = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
    local_rank = int(environment["SLURM_LOCALID"])
    restart = int(environment.get("SLURM_RESTART_COUNT", 0))
    array = environment.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]
    task = Task(local_rank=local_rank, restart=restart, job=job, log=f"{job}_{number}_log")
    if processes is Processes.TOGETHER:
        return replace(task, rank=number, world=count)
    if processes is Processes.SHARDS:
        array_task = first_shard + int(environment.get("SLURM_ARRAY_TASK_ID", 0))
        return replace(task, shard=array_task * count + number, num_shards=num_array_tasks * count)
    return replace(task, idle=number > 0)
