"""Passes that are filled while others compute: neither waits, and neither outlives the other."""

import threading

import pytest

from stages.context import Context, StageError, Stopped
from stages.engines.processes.beside import Beside
from stages.engines.processes.parts import Pass, collect, fill
from stages.rewards.side_by_side import side_by_side
from tests.waiting import TIMEOUT_S


def test_both_sides_are_under_way_at_once(ctx: Context) -> None:
    """Each waits for the other to have begun: one after the other, they would wait for ever."""
    begun = threading.Barrier(2, timeout=TIMEOUT_S)

    def meet(unit: range) -> list[int]:
        begun.wait()
        return list(unit)

    aside, here = Pass("aside", 3, 3, lambda: meet), Pass("here", 2, 2, lambda: meet)
    with Beside(ctx).fill(aside):
        fill(ctx, here)
    assert collect(ctx, aside) == [0, 1, 2]
    assert collect(ctx, here) == [0, 1]


def test_a_failure_aside_is_heard_of(ctx: Context) -> None:
    def fail(_: range) -> list[int]:
        raise StageError("no reward")

    aside = Pass("aside", 1, 1, lambda: fail)
    with pytest.raises(StageError, match="no reward"), Beside(ctx).fill(aside):
        pass


def test_a_failure_here_ends_what_is_aside(ctx: Context) -> None:
    under_way, closed, enough = threading.Event(), threading.Event(), threading.Event()
    beside = Beside(ctx)
    waited = []

    def slow(unit: range) -> list[None]:
        under_way.set()
        work = lambda: waited.append(enough.wait(TIMEOUT_S))  # noqa: E731
        return side_by_side(beside.ctx, [work] * len(unit), 1)

    def body() -> None:
        with beside.fill(Pass("aside", 1, 1, lambda: slow, close=closed.set)):
            under_way.wait(TIMEOUT_S)
            raise StageError("here")

    with pytest.raises(StageError, match="here"):
        body()
    assert closed.is_set(), "what the pass opened is closed"
    assert not waited, "nobody waits for work under way"
    enough.set()
    assert not ctx.should_stop(), "nobody asked the stage itself to stop"


def test_being_asked_to_stop_stops_both(ctx: Context) -> None:
    ctx.request_stop()
    aside = Pass("aside", 1, 1, lambda: lambda unit: list(unit))
    with pytest.raises(Stopped), Beside(ctx).fill(aside):
        fill(ctx, Pass("here", 1, 1, lambda: lambda unit: list(unit)))
