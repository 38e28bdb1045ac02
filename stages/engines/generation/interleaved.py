"""Units that wait for others, such as environments: while one waits, another is decoded.

What a generator answers depends on the requests of its call alone, so which unit is ready first
changes no byte.
"""

import heapq
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from stages.engines.generation.generator import Completion, Request

LOOK_S = 0.5
"""Between two looks at whether the job is to stop, while all wait."""
Turns = Generator[Sequence[Request] | Future[Any], Any, list[Completion]]
"""What becomes of a unit: it asks for completions of some requests, or waits for a future, and is
sent what comes of that; at the end it has a completion for each of its requests."""


@dataclass(order=True)
class _Unit:
    start: int
    rows: range = field(compare=False)
    turns: Turns = field(compare=False)
    reply: Any = field(default=None, compare=False)


def interleaved(
    units: Iterator[range],
    begin: Callable[[range], Turns],
    generate: Callable[[Sequence[Request]], list[Completion]],
    *,
    at_once: int,
    check: Callable[[], None],
) -> Iterator[tuple[range, list[Completion]]]:
    """Each unit with its completions, once it has them; of those that are ready the first goes on.

    `check` may raise, between two turns and while all wait.
    """
    ready: list[_Unit] = []
    answered: SimpleQueue[_Unit] = SimpleQueue()
    under_way: dict[int, _Unit] = {}
    try:
        while True:
            check()
            while len(under_way) < at_once and (rows := next(units, None)) is not None:
                unit = under_way[rows.start] = _Unit(rows.start, rows, begin(rows))
                heapq.heappush(ready, unit)
            if not under_way:
                return
            while not answered.empty() or not ready:
                try:
                    heapq.heappush(ready, answered.get(timeout=LOOK_S))
                except Empty:
                    check()
            unit = heapq.heappop(ready)
            reply, unit.reply = unit.reply, None
            try:
                wanted = unit.turns.send(reply.result() if isinstance(reply, Future) else reply)
            except StopIteration as end:
                del under_way[unit.start]
                yield unit.rows, end.value
                continue
            unit.reply = wanted if isinstance(wanted, Future) else generate(wanted)
            if isinstance(wanted, Future):
                wanted.add_done_callback(partial(_tell, answered, unit))
            else:
                heapq.heappush(ready, unit)
    finally:
        for unit in under_way.values():
            unit.turns.close()


def _tell(answered: "SimpleQueue[_Unit]", unit: _Unit, _: "Future[Any]") -> None:
    answered.put(unit)
