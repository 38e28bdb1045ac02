"""On a cluster, slurmd and slurmctld may die as well: the same bytes, and no job left."""

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pipelines.dvc_repo.lock_file import read_stages
from tests.chaos.conftest import copy_to_torment
from tests.chaos.monkey import (
    Monkey,
    differences,
    leftovers,
    number_of_kills,
    pace_of,
    results,
    rounds,
    the_seed,
    wait_for_quiet,
)
from tests.slurm.conftest import _why_not, cluster, on_slurm
from tests.waiting import TIMEOUT_S

__all__ = ["cluster"]

_reason = _why_not()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]

ROUND = 10
TARGET = "rollout@iter_001"
"""With what is before it and not prepared: one job, then an array of two."""


def test_whatever_is_killed_on_a_cluster_the_same_command_ends_with_the_same_bytes(
    prepared_root: Path, peaceful_root: Path, tmp_path: Path, cluster: Any
) -> None:
    seed = the_seed()
    for number, kills in enumerate(rounds(number_of_kills(ROUND), ROUND)):
        with copy_to_torment(prepared_root, tmp_path / "clone") as copy:
            clone = on_slurm(copy.root, cluster)
            clone.set_profile(checkpoint_seconds=0.2, requeues=20)
            cluster.up()
            try:
                torment(clone, peaceful_root, seed, kills, number)
            finally:
                cluster.up()
                cluster.cancel_all()


def torment(clone: Any, peaceful_root: Path, seed: int, kills: int, number: int) -> None:
    draw = random.Random(f"{seed} {number}")

    def kill_controller() -> str:
        clone.cluster.kill_controller()
        time.sleep(draw.uniform(0, 4))
        clone.cluster.start_controller()
        return "slurmctld"

    def kill_node() -> str:
        name = draw.choice(clone.cluster.layout.names)
        clone.cluster.kill_node(name)
        time.sleep(draw.uniform(0, 4))
        clone.cluster.start_node(name)
        return f"slurmd of {name}"

    monkey = Monkey(
        clone,
        seed,
        kills,
        pace_of(peaceful_root, kills) / 3,
        number=number,
        roles=("worker", "driver", "dvc", "runner", "all"),
        more={"slurmctld": kill_controller, "slurmd": kill_node},
    )
    with somebody_who_releases(clone.cluster):
        monkey.torment("lockstep", "run", TARGET)
        clone.run("lockstep", "run", TARGET)
        problems = [f"job {job} is still there" for job in left_in_the_queue(clone)]
    problems += [f"still runs: {line}" for line in wait_for_quiet(clone)]
    made, wanted = results(clone.root), results(peaceful_root)
    del made["dvc.lock"]
    problems += differences(made, {path: wanted.get(path) for path in made})
    recorded, expected = read_stages(clone.root), read_stages(peaceful_root)
    problems += differences(
        recorded, {name: expected[name] for name in ("code", "prepare", "sft", TARGET)}
    )
    problems += [f"left: {path}" for path in leftovers(clone.root)]
    assert not problems, monkey.story("\n".join(problems))


@contextmanager
def somebody_who_releases(cluster: Any) -> Iterator[None]:
    """Does what `lockstep status` asks for where Slurm holds a job.

    It does so with one that a node refuses to start twice: a controller that was killed before it
    wrote down that a job runs starts it again, while its first start is still ending.
    """
    over = threading.Event()

    def release() -> None:
        while not over.wait(2.0):
            with suppress(subprocess.TimeoutExpired):  # the controller is away
                jobs = cluster.run("squeue", "-h", "-o", "%i %r", check=False).splitlines()
                for number, _, reason in (job.partition(" ") for job in jobs):
                    if "held" in reason:
                        cluster.run("scontrol", "release", number, check=False)

    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        yield
    finally:
        over.set()
        releasing.join()


def left_in_the_queue(clone: Any) -> list[str]:
    """Until no job is left: a shard whose node died is started again, and finds all done.

    A node that is back before it is missed has up to two minutes until Slurm asks for its jobs.
    """
    deadline = time.monotonic() + TIMEOUT_S
    jobs: list[str] = []
    while (jobs := clone.jobs()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return jobs
