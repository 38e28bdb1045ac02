"""Ranks on their way to each other: slow ones are waited for, and nobody that has left is."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.ledger.task import Task
from pipelines.worker.rendezvous import meet, with_heartbeats
from stages.context import RankLost, Stopped
from stages.engines.processes.heartbeats import Heartbeats
from tests.waiting import FOR_EVER_S, must_not_wait

"""No test waits for so long, unless the ranks do."""


def come(
    folder: Path,
    rank: int,
    check: Callable[[], object] = lambda: None,
    timeout_s: float = FOR_EVER_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    task = Task(rank=rank, world=3)
    with with_heartbeats(task, folder, timeout_s) as signs:
        check()
        return meet(task, folder, signs, should_stop)


def all_come(
    folder: Path, check: Callable[[int], object], **options: object
) -> list[Future[dict[str, str]]]:
    with ThreadPoolExecutor(3) as pool:
        return [
            pool.submit(come, folder, rank, lambda rank=rank: check(rank), **options)  # type: ignore[misc, arg-type]
            for rank in range(3)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_hashes_for_longer_than_the_timeout_is_waited_for(
    tmp_path: Path, slow: int
) -> None:
    found = all_come(tmp_path, lambda rank: rank == slow and time.sleep(12), timeout_s=10)
    variables = [each.result() for each in found]
    assert [each["RANK"] for each in variables] == ["0", "1", "2"]
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables}) == 1


def test_nobody_is_told_where_to_meet_before_all_are_ready(tmp_path: Path) -> None:
    """Who is told begins to wait in the backend, which heeds no signal."""
    ready = threading.Event()
    done: list[int] = []

    def check(rank: int) -> None:
        if rank == 2:
            time.sleep(1)
            assert not done
            ready.set()

    def one(rank: int) -> None:
        come(tmp_path, rank, lambda: check(rank))
        assert ready.is_set()
        done.append(rank)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(one, rank) for rank in range(3)]:
            each.result()


@must_not_wait
@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_that_is_told_to_stop_takes_the_others_with_it(tmp_path: Path, first: int) -> None:
    def check(rank: int) -> None:
        if rank == first:
            raise Stopped("while hashing")

    for each in all_come(tmp_path, check):
        with pytest.raises(Stopped):
            each.result()


@must_not_wait
def test_ranks_that_wait_heed_the_word_to_stop(tmp_path: Path) -> None:
    """Rank 2 never comes, as one that hangs on its disk."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(come, tmp_path, r, should_stop=stop.is_set) for r in range(2)]
    for each in found:
        with pytest.raises(Stopped):
            each.result()


def test_an_error_on_the_way_is_that_of_all(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        if rank == 1:
            raise ValueError("not what it was submitted for")

    errors = [each.exception() for each in all_come(tmp_path, check)]
    assert isinstance(errors[1], ValueError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankLost)
        assert "rank 1 failed before the start: not what it was" in str(errors[rank])


@pytest.mark.slow
def test_a_rank_that_sends_no_heartbeat_is_named(tmp_path: Path) -> None:
    lost = Heartbeats(tmp_path, 2, 3, FOR_EVER_S)
    lost.begin()
    lost.end()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(come, tmp_path, rank, timeout_s=10) for rank in range(2)]
    for each in found:
        with pytest.raises(RankLost, match=r"rank 2 on .* has not come to the start; its last"):
            each.result()
