"""Joined ranks that share units: one that stops within a unit, and one that is slower."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from stages.context import Context, ShareDone, Stopped
from stages.engines.processes import heartbeats
from stages.engines.processes.parts import Pass, collect, fill
from stages.engines.processes.ranks import join
from stages.rewards.side_by_side import side_by_side
from tests.ports import free_port
from tests.stages.forks import FORKS
from tests.waiting import TIMEOUT_S, until

WORLD, COLLECTIVE_S, LOOK_S, SLOW_S = 2, 6.0, 1.5, 9.0


def go_through(share, root):
    """What `share(ctx)` returned on each rank, or how it ended there; empty where the rank died."""
    port = free_port()
    ranks = [
        FORKS.Process(target=one_rank, args=(share, root, rank, port)) for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [(root / f"said-{rank}").read_text() for rank in range(WORLD)]


def one_rank(share, root, rank, port):
    torch.set_num_threads(1)
    heartbeats.BEAT_S, heartbeats.LOOK_S = 0.1, LOOK_S
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    how = {"rank": rank, "world": WORLD, "collective_seconds": COLLECTIVE_S}
    ctx = Context("test", None, 0, root / "job", heartbeats=root / "signs", **how)
    said = root / f"said-{rank}"
    said.touch()
    # They are to be late for nothing but what is tested.
    until(lambda: all((root / f"said-{each}").exists() for each in range(WORLD)), "all are there")
    try:
        with join(ctx):
            said.write_text(str(share(ctx)))
    except Stopped:
        said.write_text("stopped")
    except ShareDone:
        pass


def stops_in_a_unit(ctx):
    """Rank 1 is asked to stop while it waits for a judge, and rank 0 has no units left."""

    def ask():
        if ctx.rank:
            ctx.request_stop()
            time.sleep(SLOW_S)
        return 1.0

    work = Pass("judge", WORLD, 1, lambda: lambda unit: side_by_side(ctx, [ask for _ in unit], 1))
    fill(ctx, work)
    return collect(ctx, work)


def is_slower(ctx, *, goes_on):
    """Rank 1 takes longer for its unit than a collective may take; a model may be next."""

    def compute(unit):
        time.sleep(SLOW_S if ctx.rank else 0)
        return [1.0 for _ in unit]

    def together(units):
        return ((unit, [2.0 for _ in unit]) for unit in units)

    judge = Pass("judge", WORLD, 1, lambda: compute)
    model = Pass("model", WORLD, 1, dict, together=together)
    works = [judge, model] if goes_on else [judge]
    fill(ctx, *works)
    return [collect(ctx, work) for work in works]


def test_a_rank_that_is_stopped_within_a_unit_stops_all(tmp_path: Path) -> None:
    assert go_through(stops_in_a_unit, tmp_path) == ["stopped"] * WORLD


@pytest.mark.parametrize(
    ("goes_on", "said"), [(False, [[1.0] * 2]), (True, [[1.0] * 2, [2.0] * 2])]
)
def test_a_rank_may_be_slower_than_a_collective_may_take(
    tmp_path: Path, goes_on: bool, said: list[list[float]]
) -> None:
    assert go_through(partial(is_slower, goes_on=goes_on), tmp_path) == [str(said)] * WORLD
