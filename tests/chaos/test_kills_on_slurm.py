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
from tests.chaos.conftest import copy_of, copy_to_torment
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
from tests.slurm.light_stages import ANSWER_BY_HASH, COUNTING_STAGE
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
EPOCHS = 120
"""Of an SFT that counts, twenty a second."""
SLOWLY = "\nimport time\n\n_at_once = Hashes._answer\n"
SLOWLY += "Hashes._answer = lambda *given: (time.sleep(0.1), _at_once(*given))[1]\n"
"""So that shards can be caught at it."""
WITH_TOKENIZER = """
import shutil

_count = run


def run(config, inputs, out, ctx):
    metrics = _count(config, inputs, out, ctx)
    shutil.copy(inputs["base"] / "tokenizer.json", out["model"])
    return metrics
"""
"""What rollouts need of a policy to read their answers."""


@pytest.fixture(scope="module")
def light_root(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose stages compute without a model: a real one imports its libraries for seconds.

    What they are in, they share with real ones: attempts, checkpoints, shards and their parts.
    """
    clone = copy_of(prepared_root, tmp_path_factory.mktemp("light") / "clone")
    clone.without_tracking()
    clone.set_params(sft__epochs=EPOCHS)
    clone.write_code("stages/sft.py", COUNTING_STAGE + WITH_TOKENIZER)
    clone.write_code("stages/engines/generation/generators.py", ANSWER_BY_HASH + SLOWLY)
    clone.commit("light")
    return clone.root


@pytest.fixture(scope="module")
def left_in_peace(light_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it in which the stages have run on this machine, undisturbed."""
    clone = copy_of(light_root, tmp_path_factory.mktemp("in-peace") / "clone")
    clone.without_tracking()
    began = time.monotonic()
    clone.run("lockstep", "run", TARGET, LOCKSTEP_WARM="off")
    (clone.root.parent / "seconds").write_text(str(time.monotonic() - began))
    return clone.root


def test_whatever_is_killed_on_a_cluster_the_same_command_ends_with_the_same_bytes(
    light_root: Path, left_in_peace: Path, tmp_path: Path, cluster: Any
) -> None:
    seed = the_seed()
    for number, kills in enumerate(rounds(number_of_kills(ROUND), ROUND)):
        with copy_to_torment(light_root, tmp_path / "clone") as copy:
            clone = on_slurm(copy.root, cluster)
            clone.set_profile(checkpoint_seconds=0.2, requeues=20)
            cluster.up()
            try:
                torment(clone, left_in_peace, seed, kills, number)
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
