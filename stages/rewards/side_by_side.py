"""Calls that run side by side, whose results come in the order of the calls.

The threads are daemons: a call that hangs in the network keeps nobody from stopping. The first call
to fail, in the order of the calls among those that have failed by then, is what the caller hears
of; those that have not begun are dropped.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stages.context import Context, Stopped

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
