"""Fused steps as jobs over nodes: the bytes of the staged loop, whoever is lost on the way."""

import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks.clones import copy_clone
from tests.chaos.monkey import the_seed
from tests.slurm.conftest import SlurmClone, lose_node, on_slurm
from tests.stages.conftest import Runner
from tests.stages.test_online import GRPO, PPO
from tests.stages.test_online_ranks import FUSED, NAMES, STAGED, go_through, left
from tests.waiting import ended, succeeded

pytestmark = pytest.mark.slow

ONLINE = FUSED[0]
RUN = ("dvc", "repro", "--single-item", ONLINE)
SPREAD = {"nodes": 2, "tasks_per_node": 1, "gpus_per_node": 1, "sharding": "fsdp"}
WHOLE = {**SPREAD, "sharding": "none"}
APART = {"nodes": 2, "tasks_per_node": 2, "gpus_per_node": 2, "memory": "3600M", "samplers": 2}
"""The second node samples for the first."""
MOMENTS = {
    "the ranks meet": "attempts/*/restarts/*/rendezvous.json",
    "they sample": "scratch/steps/*/scratch/parts/*/*",
    "they have taken a step": "metrics.jsonl",
}
"""When somebody is lost: what has appeared in the job's entry by then."""


@pytest.fixture(scope="module")
def staged(
    pipeline_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """What iterations leave whose updates had so many ranks of this machine."""
    made: dict[str, dict[str, Any]] = {}

    def get(rl: dict[str, str], world: int, sharding: str) -> dict[str, Any]:
        key = f"{rl} {world} {sharding}"
        if key not in made:
            runner = Runner(tmp_path_factory.mktemp("staged"))
            shutil.copytree(pipeline_root / "artifacts", runner.root / "artifacts")
            params = YAML(typ="safe").load(pipeline_root / "params.yaml")
            go_through(runner, STAGED, rl, params, world, sharding)
            made[key] = left(runner, NAMES[-1])
        return made[key]

    return get


@pytest.fixture
def clone(pipeline_root: Path, tmp_path: Path, cluster: Any) -> Iterator[SlurmClone]:
    """With everything that fused steps start from."""
    copy_clone(pipeline_root, tmp_path / "clone")
    clone = on_slurm(tmp_path / "clone", cluster)
    clone.set_params(rl__online={"fast": {"policy": "sft", "steps": len(NAMES)}})
    clone.set_profile(partition="gpu", checkpoint_seconds=0.2)
    yield clone
    clone.kill_all()


def prepare(clone: SlurmClone, rl: dict[str, str], resources: dict[str, Any]) -> None:
    clone.set_params(**{f"rl__{key}": value for key, value in rl.items()})
    clone.set_profile(online=resources)


def made(clone: SlurmClone) -> dict[str, Any]:
    return left(Runner(clone.root), "fast")


def wait_for_a_moment(clone: SlurmClone, draw: random.Random) -> None:
    moment = draw.choice(list(MOMENTS))
    entry = f".lockstep/jobs/{ONLINE}/*/"
    clone.until(lambda: any(clone.root.glob(entry + MOMENTS[moment])), moment)
    time.sleep(draw.uniform(0, 0.3))


def test_grpo_goes_on_where_one_of_two_ranks_was_killed(clone: Any, staged: Any) -> None:
    prepare(clone, GRPO, WHOLE)
    draw = random.Random(the_seed())
    driver = clone.start(*RUN)
    wait_for_a_moment(clone, draw)
    rank = draw.randrange(2)
    for worker in clone.workers(ONLINE)[rank : rank + 1]:  # there is none where all is done
        worker.kill()
    output = ended(driver)
    if driver.returncode:
        assert f"rank {rank} on 127.0.0.1{1 + rank}: Killed" in output
        clone.run(*RUN)
    assert made(clone) == staged(GRPO, 2, "none")
    assert clone.steps(ONLINE) == [1, 2], "each step once, by one rank for all"


def test_ppo_spread_over_two_nodes_goes_on_where_one_was_lost(clone: Any, staged: Any) -> None:
    prepare(clone, PPO, SPREAD)
    driver = clone.start(*RUN)
    wait_for_a_moment(clone, random.Random(the_seed()))
    lose_node(clone.cluster, "127.0.0.12")
    succeeded(driver)
    attempt = clone.attempt(stage=ONLINE)
    if clone.status(ONLINE)["restarts"]:
        [log] = attempt.folder.glob("*_0_log.err")
        # Whoever misses it first: rank 0, or Slurm, which then ends rank 0.
        assert re.search("rank 1 on|DUE TO NODE FAILURE", log.read_text())
    assert made(clone) == staged(PPO, 2, "fsdp")
    assert attempt.result.environment["sharding"] == "fsdp"
    assert clone.steps(ONLINE) == [1, 2], "each step once, by one rank for all"


def test_a_job_whose_second_node_samples(clone: Any, staged: Any) -> None:
    prepare(clone, GRPO, APART)
    clone.run(*RUN)
    attempt = clone.attempt(stage=ONLINE)
    assert [task.state for task in attempt.tasks] == ["completed", "done", "done", "done"]
    made_by = attempt.result.environment
    assert (made_by["world"], made_by["samplers"]) == (2, 2)
    assert made(clone) == staged(GRPO, 2, "none")
