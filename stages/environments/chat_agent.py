"""An agent that asks for completions, as an environment: its own loop drives the policy.

The agent runs as it is, with a client of OpenAI's API and an address on loopback. Its first request
is the row's prompt. Each request is answered with the policy's turn, and continues the dialogue
with what the policy is to read next: as messages, as a text or as ids (agent_requests.py). The
episode is over when the agent returns its reward.

The dialogue can only grow: what was sampled stays as it was, as ids, and text never becomes ids of
a turn again. So a request that has another past than the policy's is an error, and how to sample
is for the params to say, not for a request.
"""

import asyncio
import inspect
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, NoReturn

from stages.environments.agent_requests import Ids, Past, Refused, past_for
from stages.environments.chat_server import GONE, OVER, Asked, ChatServer
from stages.environments.environment import Environment, NoAnswer, Observation
from stages.environments.spoken import Sampled, Spoken
from stages.environments.threads import in_a_thread


class ChatAgent(Environment):
    """One run of an agent; subclasses run it."""

    reads_ids: ClassVar[bool] = True

    _server: ClassVar[ChatServer] = ChatServer()
    _url = ""
    _running: "asyncio.Task[float]"
    _asked: "asyncio.Queue[Asked]"
    _pending: Asked | None = None
    """The request that waits for the policy."""
    _past: Past
    _sampled: Sampled | None = None
    """The policy's latest turn."""
    _over = False

    @abstractmethod
    def run(self, base_url: str, row: Mapping[str, Any], seed: int) -> float | Awaitable[float]:
        """Run the agent against the API at `base_url`; the episode's reward. May be `async`.

        All randomness of the agent must come from the seed, as for every environment.
        """

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        self._row = row
        self._asked = asyncio.Queue()
        self._url = self._server.open(lambda asked: _soon(loop, self._receive, asked))
        self._running = loop.create_task(self._ran(row, seed))
        if (asked := await self._next()) is None:
            raise NoAnswer("the agent returned before it asked the policy anything")
        self._begin(asked)

    async def step(self, action: str) -> Observation:  # type: ignore[override]
        self._tell(action)
        if (asked := await self._next()) is None:
            return Observation(reward=await self._running, done=True)
        return self._read_on(asked)

    async def close(self) -> None:  # type: ignore[override]
        """Nobody answers the agent any more."""
        if not self._url:
            return
        self._over = True
        self._server.shut(self._url)
        self._running.cancel()
        left = [self._pending] if self._pending else []
        while not self._asked.empty():
            left.append(self._asked.get_nowait())
        for asked in left:
            self._receive(asked)
        self._pending = None

    async def _ran(self, row: Mapping[str, Any], seed: int) -> float:
        """The reward; NoAnswer with what the agent raised, be it that it exits."""
        reward: Any
        try:
            if inspect.iscoroutinefunction(self.run):
                reward = await self.run(self._url, row, seed)
            else:
                loop = asyncio.get_running_loop()
                reward, error = await in_a_thread(loop, self.run, self._url, row, seed)
                if error is not None:
                    raise error
            paid: float = await reward if inspect.isawaitable(reward) else reward
            return paid
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # The address is another one in every run, and errors are recorded.
            why = f"{type(error).__name__}: {error}".replace(self._url, "the policy's address")
            raise NoAnswer(why) from error

    def _receive(self, asked: Asked) -> None:
        """On the loop."""
        if self._over:
            asked.refuse(OVER, GONE)
        else:
            self._asked.put_nowait(asked)

    async def _next(self) -> Asked | None:
        """What the agent asks next; None where it has ended."""
        asking = asyncio.ensure_future(self._asked.get())
        try:
            done, _ = await asyncio.wait(
                {asking, self._running}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asking.cancel()
        if asking not in done:
            self._running.result()
            return None
        self._pending = asking.result()
        return self._pending

    def _begin(self, asked: Asked) -> None:
        """With the first request."""
        try:
            self._past = past_for(asked.route, asked.body, self.role)
            self._past.begin(asked.body, self._row)
        except Refused as problem:
            self._refuse(str(problem))

    def _read_on(self, asked: Asked) -> Observation:
        """What is new in the next one for the policy to read."""
        try:
            past = past_for(asked.route, asked.body, self.role)
            if type(past) is not type(self._past):
                # Whoever asks with ids has them from the answers: they are all that was said.
                if not isinstance(past, Ids):
                    raise Refused(
                        "the agent goes on in another way than it has begun: after messages with "
                        "messages, after texts with texts, after any with ids"
                    )
                self._past = past
            return self._past.read_on(asked.body, self._sampled)
        except Refused as problem:
            self._refuse(str(problem))

    def _tell(self, action: str) -> None:
        """Answer the agent with the policy's turn."""
        assert self._pending is not None
        self._sampled = action.sampled if isinstance(action, Spoken) else None
        message = self._past.tell(action, self._pending.body)
        self._pending.answer(message, self._sampled)
        self._pending = None

    def _refuse(self, why: str) -> NoReturn:
        """Tell the agent, and fail."""
        assert self._pending is not None
        self._pending.refuse(why)
        self._pending = None
        raise NoAnswer(why)


def _soon(loop: AbstractEventLoop, put: Any, asked: Asked) -> None:
    try:
        loop.call_soon_threadsafe(put, asked)
    except RuntimeError:  # the loop is closed
        asked.refuse(OVER, GONE)
