"""How the ranks of a job find each other, once each node has checked what it is about to read.

In a folder of this very start of the job, each rank sends heartbeats from its beginning and a
mark when it is ready; then rank 0 says where to meet. Always true:
- A rank is waited for as long as it sends heartbeats: its inputs may be large, its disk slow.
- A rank that is told to stop, or that fails, takes the others with it, whether or not they have
  been told: nobody waits for one that has left.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.ledger.task import Task
from stages.context import Context, RankLost, Stopped
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.node import node_name

POLL_S = 0.3
_PLACE = "rendezvous.json"


@dataclass(frozen=True)
class Gathering:
    """This rank on its way to the others; without others, it is there already."""

    task: Task
    should_stop: Callable[[], bool]
    folder: Path | None = None
    heartbeats: Heartbeats | None = None

    def meet(self, name: str = "") -> None:
        """Wait until all have come so far; ranks that meet again do so in a folder of a name.

        Each time torch.distributed gets a place of its own in the environment.
        """
        if self.folder is None:
            return
        assert self.heartbeats is not None
        place = self.folder / name
        place.mkdir(exist_ok=True)
        os.environ.update(meet(self.task, place, self.heartbeats, self.should_stop))


@contextmanager
def among_ranks(task: Task, context: Context) -> Iterator[Gathering]:
    """Around what comes before the stage."""
    if task.world == 1:
        yield Gathering(task, context.should_stop)
        return
    folder = context.heartbeats
    assert folder is not None
    with with_heartbeats(task, folder, context.collective_seconds) as heartbeats:
        yield Gathering(task, context.should_stop, folder, heartbeats)


@contextmanager
def with_heartbeats(task: Task, folder: Path, timeout_s: float) -> Iterator[Heartbeats]:
    """Around all that a rank does before it meets the others, with heartbeats from the start."""
    heartbeats = Heartbeats(folder, task.rank, task.world, timeout_s)
    heartbeats.at = "the check of its inputs"
    heartbeats.begin()
    try:
        yield heartbeats
    except Stopped as error:
        # The others may be past the point where they would look for their own word to stop.
        heartbeats.write_failure(f"rank {task.rank} was told to stop: {error}", stopped=True)
        raise
    except RankLost as error:
        heartbeats.write_failure(str(error))
        raise
    except BaseException as error:
        cause = str(error) or repr(error)
        heartbeats.write_failure(f"rank {task.rank} failed before the start: {cause}")
        raise
    finally:
        heartbeats.end()


def meet(
    task: Task, folder: Path, heartbeats: Heartbeats, should_stop: Callable[[], bool]
) -> dict[str, str]:
    """Wait until all are ready; what torch.distributed reads of the environment.

    A port derived from the job's number, as is usual, may be taken by another job on the node.
    """
    (folder / f"ready-{task.rank}").touch()
    # One rank looks at all, and all look at that one: not each at each.
    if task.rank == 0:

        def not_ready() -> list[int]:
            ranks = range(1, task.world)
            return [rank for rank in ranks if not (folder / f"ready-{rank}").exists()]

        _wait(heartbeats, should_stop, not_ready)
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = {"address": node_name(), "port": probe.getsockname()[1]}
        atomic.write_json(folder / _PLACE, place)
    _wait(heartbeats, should_stop, lambda: [] if (folder / _PLACE).exists() else [0])
    place = atomic.load_json(folder / _PLACE)
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": os.environ.get("SLURM_NTASKS_PER_NODE", str(task.world)),
        "MASTER_ADDR": place["address"],
        "MASTER_PORT": str(place["port"]),
    }


def _wait(
    heartbeats: Heartbeats, should_stop: Callable[[], bool], late: Callable[[], list[int]]
) -> None:
    watch = heartbeats.watch()
    while ranks := late():
        if left := heartbeats.left():
            raise (Stopped if left["stopped"] else RankLost)(str(left["error"]))
        if should_stop():
            raise Stopped("before the ranks met")
        if lost := watch.look(ranks, "the start"):
            raise RankLost(lost)
        time.sleep(POLL_S)
