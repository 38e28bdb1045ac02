"""A call in a thread, awaited on a loop: as many at a time as there are callers.

A thread that has come back waits a while for another call, since starting one costs more than most
answers do. Each call has a context of its own.
"""

import asyncio
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a call returned, or raised."""
Calls = SimpleQueue[Callable[[], Callable[[], None]]]
"""What a thread is to call, and then what that returns, to tell of it."""
WAITS_S = 5.0
"""How long a thread waits for another call."""
_waiting: list[Calls] = []
"""Of the threads that have nothing to do; the latest is asked first."""
os.register_at_fork(after_in_child=_waiting.clear)  # a fork has none of them


def in_a_thread(
    loop: AbstractEventLoop, ask: Callable[..., Any], *arguments: Any
) -> "asyncio.Future[Outcome]":
    """Begin a call. Its thread is left behind where nobody waits for it any more."""
    result: asyncio.Future[Outcome] = loop.create_future()

    def give(answer: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result((answer, error))

    def call() -> Callable[[], None]:
        answer, failure = None, None
        try:
            answer = Context().run(ask, *arguments)
        except BaseException as error:
            failure = error

        def tell() -> None:
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(give, answer, failure)

        return tell

    try:
        calls = _waiting.pop()
    except IndexError:
        calls = SimpleQueue()
        Thread(target=_serve, args=(calls,), daemon=True).start()
    calls.put(call)
    return result


def _serve(calls: Calls) -> None:
    while True:
        try:
            call = calls.get(timeout=WAITS_S)
        except Empty:
            try:
                _waiting.remove(calls)
            except ValueError:
                continue  # a call is about to come
            return
        tell = call()
        # First: whoever is told may have the next call.
        _waiting.append(calls)
        tell()
        del call, tell  # and with them the environment, while nothing is asked
