"""Environments are asked side by side: each answer within its time, and again where it failed.

A loop in a thread of its own waits for all of them. An `async` method runs on that loop; any other
has a thread, which is left behind where it gives no answer in time. Or they run in processes of
their own (isolated.py).

Where an answer fails, the environment is made anew, hears all earlier actions again, and has to
answer them as before: it is a function of (row, seed, actions). What the record has is not asked
(record.py), so an environment is made when it is first needed.
"""

import asyncio
import inspect
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from stages.contracts.episodes import EpisodeParams
from stages.environments.environment import Environment, NoAnswer, Observation
from stages.environments.isolated import IsolatedEnvironment, Lane
from stages.environments.loading import find
from stages.environments.observations import Reader, checked
from stages.environments.record import NO_RECORD, Answers, Record
from stages.environments.threads import Outcome, in_a_thread
from stages.redaction import redact
from stages.rewards.isolated import Hung

GIVE_UP_S = 5.0
"""For environments that have failed, or whose stage ends early, and `async` methods that are given
up, to let go of what they have."""


@dataclass
class Seat:
    """The environment of one episode."""

    row: Mapping[str, Any]
    seed: int
    lane: Lane | None
    """The process that it runs in, where it has one."""
    answers: Answers
    """All of the episode."""
    heard: list[tuple[str, Observation]] = field(default_factory=list)
    """What it was told so far, and its answers."""
    environment: Environment | None = None
    """None until it is first asked, and after a failure."""
    late: "asyncio.Future[Outcome] | None" = None
    """The call in a thread that gave no answer in time, and may be going on."""
    seconds: float = 0.0
    """How long its answers have taken."""


class Asking:
    """What waits for the environments; to be closed."""

    def __init__(
        self,
        params: EpisodeParams,
        name: str,
        folder: Path,
        record: Record = NO_RECORD,
        text_of: Reader | None = None,
    ) -> None:
        """The environment of that name, which may be in a module of the folder.

        `text_of` reads what it answers as ids.
        """
        self.kind = find(name, folder)
        self._text_of = text_of if self.kind.reads_ids else None
        self._params, self._record = params, record
        self._loop: AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._permits = asyncio.Semaphore(params.concurrency)
        self._lanes = [Lane(name, folder) for _ in range(params.processes)]
        self._next_lane = cycle(self._lanes or [None])
        self._asked: set[Future[Any]] = set()
        self._leaving: set[Future[Any]] = set()

    def seat(self, row: Mapping[str, Any], seed: int, answers: Answers | None = None) -> Seat:
        """For a new episode, of a sample that `answers` names."""
        return Seat(row, seed, next(self._next_lane), answers or Answers({}, seed, ""))

    def begin(self, seats: Sequence[Seat]) -> "Future[list[Any]]":
        """Begin their episodes: for each a NoAnswer where it could not."""
        return self._ask([self._answered(seat, None) for seat in seats])

    def step(self, seats: Sequence[Seat], actions: Sequence[str]) -> "Future[list[Any]]":
        """What each answers to its action: an Observation, or a NoAnswer."""
        pairs = zip(seats, actions, strict=True)
        return self._ask([self._answered(seat, action) for seat, action in pairs])

    def leave(self, seats: Sequence[Seat]) -> None:
        """Nothing more is asked of them; nobody waits for it before the end."""
        left = [self._left(seat) for seat in seats if seat.environment is not None]
        if left:
            _kept(self._leaving, self._submit(_all(left)))

    def close(self, patience: float | None = None) -> None:
        """Give up what is still asked, and wait for those that are being left.

        `patience`: seconds that these have together; None: each as long as an answer may take.
        """
        if self._loop is None or self._thread is None:
            return
        for asked in list(self._asked):
            asked.cancel()
        left, late = wait(list(self._leaving), patience)
        for leaving in left:
            leaving.result()
        for leaving in late:
            leaving.cancel()
        self._submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
        for lane in self._lanes:
            lane.process.end()

    def _ask(self, questions: Sequence[Coroutine[Any, Any, Any]]) -> "Future[list[Any]]":
        return _kept(self._asked, self._submit(_all(questions)))

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            forever = self._loop.run_forever
            self._thread = Thread(target=forever, name="environments", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _answered(self, seat: Seat, action: str | None) -> Observation | NoAnswer:
        """From the record, or by the environment."""
        seat.answers.ask(action)
        answer, seconds = self._record.find(seat.answers, action), None
        if answer is not None:
            # It has not heard this, and would have to before it is asked again.
            self._give_up(seat)
        else:
            before = seat.seconds
            try:
                answer = self._checked(await self._tried(seat, action))
            except NoAnswer as problem:
                answer = _fit_to_keep(problem)
            seconds = seat.seconds - before
        seat.answers.add(action, answer, seconds)
        if action is not None and isinstance(answer, Observation):
            seat.heard.append((action, answer))
        return answer

    def _checked(self, answer: Any) -> Observation:
        return checked(answer, self._text_of)

    async def _tried(self, seat: Seat, action: str | None) -> Any:
        """An answer, also after retries; a NoAnswer where there is none for good."""
        for retry in range(self._params.retries + 1):
            if retry:
                await asyncio.sleep(self._params.backoff * 2 ** (retry - 1))
            try:
                async with self._turn(seat):
                    return await self._answer(seat, action)
            except NoAnswer as problem:
                why = problem
                self._give_up(seat)
            if self._time_left(seat) <= 0:
                break
        return why

    async def _answer(self, seat: Seat, action: str | None) -> Any:
        if seat.environment is None:
            await self._begin(seat)
        assert seat.environment is not None
        if action is None:
            return Observation()
        return await self._in_time(seat, seat.environment.step, action)

    async def _begin(self, seat: Seat) -> None:
        """With an environment that is as far as the episode is."""
        if seat.lane:
            _, error = await in_a_thread(asyncio.get_running_loop(), seat.lane.start)
            if error is not None:
                raise error
        environment = seat.environment = await self._in_time(seat, self._make, seat)
        await self._in_time(seat, environment.reset, seat.row, seat.seed)
        for turn, (action, before) in enumerate(seat.heard, start=1):
            answer = self._checked(await self._in_time(seat, environment.step, action))
            if answer != before:
                why, remedy = "after a failure", "set episodes.retries: 0"
                if seat.answers.is_recorded(turn):
                    why = "to answer what the record lacks"
                    remedy = "empty rollout.tool_record"
                raise NoAnswer(
                    f"made anew {why}, it answered the action {action!r} with {answer}, and before "
                    f"with {before}: it is to be a function of the row, the seed and the actions; "
                    f"{remedy} if it cannot be"
                )

    def _make(self, seat: Seat) -> Environment:
        return IsolatedEnvironment(seat.lane) if seat.lane else self.kind()

    async def _left(self, seat: Seat) -> None:
        async with self._turn(seat):
            environment, seat.environment = seat.environment, None
            if environment is not None and type(environment).close is not Environment.close:
                # Whatever is left of the episode's time: nothing more is asked in it.
                with suppress(NoAnswer, _Late):
                    await _called(seat.lane, self._params.answer_timeout, environment.close)

    def _give_up(self, seat: Seat) -> None:
        """Another environment is to take its place; nobody waits until it is closed."""
        environment, seat.environment = seat.environment, None
        late, seat.late = seat.late, None
        if environment is not None:
            _kept(self._leaving, self._submit(self._closed(seat, environment, late)))

    async def _closed(
        self, seat: Seat, environment: Environment, late: "asyncio.Future[Outcome] | None"
    ) -> None:
        if late is not None:
            # What is not made for two threads is closed after the first has come back.
            await asyncio.wait({late}, timeout=GIVE_UP_S)
            if not late.done():
                return
        async with self._turn(seat):
            with suppress(NoAnswer, _Late):
                await _called(seat.lane, GIVE_UP_S, environment.close)

    def _turn(self, seat: Seat) -> asyncio.Semaphore | asyncio.Lock:
        return seat.lane.turn if seat.lane else self._permits

    def _time_left(self, seat: Seat) -> float:
        limit = self._params.timeout
        return float("inf") if limit is None else limit - seat.seconds

    async def _in_time(self, seat: Seat, ask: Callable[..., Any], *arguments: Any) -> Any:
        """What a method returns; NoAnswer where it raises or takes too long."""
        limit, began = self._params.answer_timeout, monotonic()
        name = f"episodes.answer_timeout {limit:g} seconds"
        if self._time_left(seat) < limit:
            limit = self._time_left(seat)
            name = f"what was left of episodes.timeout {self._params.timeout:g} seconds"
        try:
            return await _called(seat.lane, limit, ask, *arguments)
        except _Late as late:
            seat.late = late.call
            raise NoAnswer(f"no answer within {name}") from None
        finally:
            seat.seconds += monotonic() - began


class _Late(Exception):
    """Nothing was returned in time; `call` is what goes on in a thread all the same."""

    def __init__(self, call: "asyncio.Future[Outcome] | None") -> None:
        super().__init__()
        self.call = call


async def _called(lane: Lane | None, limit: float, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What a method returns within so many seconds; _Late, or NoAnswer with what it raised."""
    loop = asyncio.get_running_loop()
    if lane:
        lane.seconds = limit
    if inspect.iscoroutinefunction(ask):
        task = loop.create_task(_caught(ask, *arguments))
        done, _ = await asyncio.wait({task}, timeout=limit)
        if not done:
            task.cancel()
            raise _Late(None)
        if task.cancelled():
            raise NoAnswer("it was cancelled")
        answer, error = task.result()
    else:
        call = in_a_thread(loop, ask, *arguments)
        # A process keeps the time itself, since it is killed before anybody else is asked in it.
        if not (await asyncio.wait({call}, timeout=None if lane else limit))[0]:
            raise _Late(call)
        answer, error = call.result()
    if isinstance(error, Hung):
        raise _Late(None)
    if isinstance(error, NoAnswer):
        raise error
    if error is not None:
        raise NoAnswer(f"{type(error).__name__}: {error}") from error
    return answer


async def _all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines)


def _kept(futures: set["Future[Any]"], future: "Future[Any]") -> "Future[Any]":
    """Among the others until it is done."""
    futures.add(future)
    future.add_done_callback(futures.discard)
    return future


def _fit_to_keep(problem: NoAnswer) -> NoAnswer:
    """The same without secrets, and of characters that every file can hold."""
    return NoAnswer(redact(str(problem)).encode(errors="replace").decode())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=GIVE_UP_S) if others else None


async def _caught(ask: Callable[..., Any], *arguments: Any) -> Outcome:
    try:
        return await ask(*arguments), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
