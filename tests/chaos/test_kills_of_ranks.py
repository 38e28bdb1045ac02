"""Any rank of a job may die at any moment: started again, its ranks end with the same bytes.

The ranks are real processes over loopback, which meet by gloo. The seed is printed, and fresh
unless LOCKSTEP_CHAOS_SEED gives it; LOCKSTEP_CHAOS_KILLS says how many kills.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.monkey import number_of_kills, the_seed
from tests.stages.conftest import Runner, trained
from tests.stages.test_online import GRPO
from tests.stages.test_online_ranks import SMALL, finish, start
from tests.waiting import TIMEOUT_S

__all__ = ["trained"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

WORLD = 2
USUAL = 4
"""Kills where nobody says how many."""
MOST = 3
"""Kills of one job, until it is left in peace."""
POLL_S = 0.002
LONGEST_REST_S = 0.5
"""So long those that were not killed may go on, until the scheduler ends them, too."""


@dataclass(frozen=True)
class Job:
    address: str
    changes: dict[str, Any]
    sharding: str


JOBS = [
    Job("online@fast", {}, "none"),
    Job("sft", {"sft": {"epochs": 4}}, "fsdp"),
    Job("online@fast", {"precision": "bfloat16"}, "fsdp"),
]


@dataclass(frozen=True)
class Peace:
    """A job that nobody disturbs: what it leaves, and how many moments there are to kill at."""

    left: dict[str, Any]
    seconds: float
    changes: int


def begin(job: Job, runner: Runner) -> list[Any]:
    """The ranks; as for any start of a job, there is nothing where they write to."""
    for path in outs_of(job, runner).values():
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (runner.root / f"{job.address}.json").unlink(missing_ok=True)
    how = (GRPO, job.changes, WORLD, job.sharding)
    return start(runner, [job.address], *how, checkpoint_seconds=0.0)


def outs_of(job: Job, runner: Runner) -> dict[str, Path]:
    rl = {"online": {"fast": {"policy": "sft", "steps": 2}}, **GRPO}
    return Runner(runner.root, **SMALL, **job.changes, rl=rl).paths(job.address)[1]


def left(job: Job, runner: Runner) -> dict[str, Any]:
    """Every file that the job has written, and its metrics but for times."""
    metrics = json.loads((runner.root / f"{job.address}.json").read_text())
    steady = {name: value for name, value in metrics.items() if "second" not in name}
    files = {name: Runner.contents(path) for name, path in outs_of(job, runner).items()}
    return {**files, "metrics": steady}


def changes_of(job: Job, runner: Runner) -> Callable[[], int]:
    """Counts how often files were seen to appear, change or go since the first call."""
    places = [runner.root / "jobs" / job.address, runner.root / "artifacts/policies"]
    before: dict[str, tuple[int, int]] = {}
    seen = 0

    def count() -> int:
        nonlocal before, seen
        now: dict[str, tuple[int, int]] = {}
        for place in places:
            for folder, _, names in os.walk(place):
                for name in names:
                    try:
                        stat = Path(folder, name).stat()
                    except OSError:  # it has just gone
                        continue
                    now[f"{folder}/{name}"] = (stat.st_mtime_ns, stat.st_size)
        seen += len({*now.items()} ^ {*before.items()})
        before = now
        return seen

    count()
    seen = 0
    return count


@pytest.fixture(scope="module")
def in_peace(trained: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Peace]:
    made: dict[int, Peace] = {}

    def of(number: int) -> Peace:
        if number not in made:
            job, root = JOBS[number], tmp_path_factory.mktemp("peace") / "run"
            runner = Runner(root)
            shutil.copytree(trained.root, root, dirs_exist_ok=True)
            ranks, count, began = begin(job, runner), changes_of(job, runner), time.monotonic()
            while any(rank.is_alive() for rank in ranks):
                count()
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            finish(runner, ranks)
            made[number] = Peace(left(job, runner), seconds, count())
        return made[number]

    return of


def kill_at_a_moment(
    draw: random.Random, job: Job, runner: Runner, ranks: list[Any], peace: Peace
) -> str:
    """What was killed and when; the rest of the ranks end soon, by themselves or not."""
    at_change = draw.random() < 0.7
    change, seconds = draw.randint(1, peace.changes), draw.uniform(0, peace.seconds)
    killed = draw.choice([[0], [1], [0, 1]])
    rest = draw.uniform(0, LONGEST_REST_S)
    count, began = changes_of(job, runner), time.monotonic()
    moment = "its end"
    while all(rank.is_alive() for rank in ranks):
        passed = time.monotonic() - began
        assert passed < TIMEOUT_S, "the ranks have not come to an end"
        if count() >= change if at_change else passed >= seconds:
            moment = f"change {change}" if at_change else f"{seconds:.2f} s"
            break
        time.sleep(POLL_S)
    for rank in killed:
        if ranks[rank].is_alive():
            os.kill(ranks[rank].pid, signal.SIGKILL)
    deadline = time.monotonic() + rest
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return f"{job.address} {job.sharding}: ranks {killed} at {moment}"


def test_whichever_rank_is_killed_its_job_ends_with_the_same_bytes(
    trained: Runner, in_peace: Callable[[int], Peace], tmp_path: Path
) -> None:
    draw, kills = random.Random(the_seed()), number_of_kills(USUAL)
    story: list[str] = []
    number = 0
    while len(story) < kills:
        job, peace = JOBS[number % len(JOBS)], in_peace(number % len(JOBS))
        runner = Runner(tmp_path / "run")
        shutil.copytree(trained.root, runner.root, dirs_exist_ok=True)
        for _ in range(min(draw.randint(1, MOST), kills - len(story))):
            ranks = begin(job, runner)
            story.append(kill_at_a_moment(draw, job, runner, ranks, peace))
        finish(runner, begin(job, runner))
        found = left(job, runner)
        other = [name for name in peace.left if found.get(name) != peace.left[name]]
        assert not other, "\n".join([*story, f"other bytes: {other}"])
        shutil.rmtree(runner.root)
        number += 1
