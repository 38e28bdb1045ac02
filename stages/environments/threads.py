"""A call in a thread of its own, awaited on a loop: as many at a time as there are callers."""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a call returned, or raised."""


def in_a_thread(
    loop: AbstractEventLoop, ask: Callable[..., Any], *arguments: Any
) -> "asyncio.Future[Outcome]":
    """Begin a call. Its thread is left behind where nobody waits for it any more."""
    result: asyncio.Future[Outcome] = loop.create_future()

    def tell(answer: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result((answer, error))

    def call() -> None:
        answer, failure = None, None
        try:
            answer = ask(*arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, answer, failure)

    Thread(target=call, daemon=True).start()
    return result
