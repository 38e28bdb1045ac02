"""Calls that run side by side, whose results come in the order of the calls.

The threads are daemons: a call that hangs in the network keeps nobody from stopping. The first call
to fail, in the order of the calls among those that have failed by then, is what the caller hears
of; those that have not begun are dropped.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from stages.context import Context, Stopped
from stages.rewards.given import Row

LOOK_INTERVAL_S = 0.2
Result = TypeVar("Result")


def side_by_side(
    ctx: Context,
    calls: Sequence[Callable[[], Result]],
    concurrency: int,
    give_up: Callable[[], None] = lambda: None,
) -> list[Result]:
    """The result of every call; `give_up` ends those under way where one failed or we stop."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        left.put(index)
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    dropped = threading.Event()

    def work() -> None:
        while not dropped.is_set():
            try:
                index = left.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((index, calls[index](), None))
            except BaseException as error:
                done.put((index, None, error))

    for _ in range(min(concurrency, len(calls))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}
    try:
        while len(results) < len(calls):
            if ctx.should_stop():
                raise Stopped(f"stopped after {len(results)} of {len(calls)} calls")
            try:
                index, result, failure = done.get(timeout=LOOK_INTERVAL_S)
            except queue.Empty:
                continue
            if failure is None:
                results[index] = result
            else:
                failures[index] = failure
            if failures and done.empty():
                raise failures[min(failures)]
    except BaseException:
        dropped.set()
        give_up()
        raise
    return [results[index] for index in range(len(calls))]


class BatchScorer(ABC):
    """Rewards of rows, batch by batch, each batch a call of its own."""

    def __init__(self, ctx: Context, concurrency: int, batch_size: int = 1) -> None:
        self._ctx, self._concurrency, self._batch_size = ctx, concurrency, batch_size
        self._given_up = threading.Event()
        """Nobody waits for the calls under way any more."""

    def score(self, rows: Sequence[Row]) -> list[float]:
        size = self._batch_size
        calls = [
            partial(self._of_batch, rows[start : start + size])
            for start in range(0, len(rows), size)
        ]
        results = side_by_side(self._ctx, calls, self._concurrency, self._give_up)
        return [reward for result in results for reward in result]

    def close(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        self._given_up.set()

    @abstractmethod
    def _of_batch(self, batch: Sequence[Row]) -> list[float]: ...
