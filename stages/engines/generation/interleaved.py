"""Units that wait for others, such as environments: while one waits, another is decoded.

What a generator answers depends on the requests of its call alone, so which unit is ready first
changes no byte.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from stages.engines.generation.generator import Completion, Request

LOOK_S = 0.5
"""Between two looks at whether the job is to stop, while all wait."""
Turns = Generator[Sequence[Request] | Future[Any], Any, list[Completion]]
"""What becomes of a unit: it asks for completions of some requests, or waits for a future, and is
sent what comes of that; at the end it has a completion for each of its requests."""


def interleaved(
    units: Iterator[range],
    begin: Callable[[range], Turns],
    generate: Callable[[Sequence[Request]], list[Completion]],
    *,
    at_once: int,
    check: Callable[[], None],
) -> Iterator[tuple[range, list[Completion]]]:
    """Each unit with its completions, once it has them.

    Whoever was ready first goes on: then all come as far, and their last waits fall together.
    `check` may raise, between two turns and while all wait.
    """
    ready: SimpleQueue[tuple[range, Any]] = SimpleQueue()
    under_way: dict[range, Turns] = {}
    try:
        while True:
            check()
            while len(under_way) < at_once and (rows := next(units, None)) is not None:
                under_way[rows] = begin(rows)
                ready.put((rows, None))
            if not under_way:
                return
            try:
                rows, future = ready.get(timeout=LOOK_S)
            except Empty:
                continue
            reply = future and future.result()
            try:
                # Once it has spoken it is told so at once, to wait while the next one speaks.
                while not isinstance(wanted := under_way[rows].send(reply), Future):
                    reply = generate(wanted)
            except StopIteration as end:
                del under_way[rows]
                yield rows, end.value
            else:
                wanted.add_done_callback(partial(_put, ready, rows))
    finally:
        for turns in under_way.values():
            turns.close()


def _put(ready: "SimpleQueue[tuple[range, Any]]", rows: range, done: "Future[Any]") -> None:
    ready.put((rows, done))
