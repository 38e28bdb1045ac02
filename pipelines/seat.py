"""Which of a job's processes this is: its rank, its shard, and how often Slurm has started the job.

Slurm says so in the environment of each process; a job without Slurm has one process.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines import atomic
from stages.contracts.base import Processes

RENDEZVOUS_S = 1800.0
"""Rank 0 hashes its inputs before it says where to meet, and those may be large."""


@dataclass(frozen=True)
class Seat:
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

    def what(self) -> str:
        """Words for a message: nothing where there is only one process."""
        if self.world > 1:
            return f"rank {self.rank} of {self.world}"
        return f"shard {self.shard} of {self.num_shards}" if self.num_shards > 1 else ""


def find_seat(
    processes: Processes,
    num_array_tasks: int,
    first_shard: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> Seat:
    """This process's place, from Slurm's variables."""
    if "SLURM_PROCID" not in environment:
        return Seat()
    task, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
    local_rank = int(environment["SLURM_LOCALID"])
    restart = int(environment.get("SLURM_RESTART_COUNT", 0))
    array = environment.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]
    seat = Seat(local_rank=local_rank, restart=restart, job=job, log=f"{job}_{task}_log")
    if processes is Processes.TOGETHER:
        return replace(seat, rank=task, world=tasks)
    if processes is Processes.SHARDS:
        array_task = first_shard + int(environment.get("SLURM_ARRAY_TASK_ID", 0))
        return replace(seat, shard=array_task * tasks + task, num_shards=num_array_tasks * tasks)
    return replace(seat, idle=task > 0)


def export_distributed(seat: Seat, folder: Path) -> None:
    """Set what torch.distributed reads; rank 0 picks a port and leaves word in `folder`.

    A port derived from the job's number, as is usual, may be taken by another job on the node.
    """
    word = folder / "rendezvous.json"
    if seat.rank == 0:
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))
            atomic.write_json(word, {"address": name, "port": probe.getsockname()[1]})
    found = _wait_for(word)
    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": os.environ.get("SLURM_NTASKS_PER_NODE", str(seat.world)),
        "MASTER_ADDR": found["address"],
        "MASTER_PORT": str(found["port"]),
    }


def _wait_for(word: Path) -> dict[str, str]:
    deadline = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < deadline:
        found: dict[str, str] | None = atomic.read_json(word)
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"rank 0 has not said where to meet within {RENDEZVOUS_S:.0f} s ({word})")
