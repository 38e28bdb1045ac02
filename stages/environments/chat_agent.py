"""An agent that asks for chat completions, as an environment: its own loop drives the policy.

The agent runs as it is, with a client of OpenAI's API and an address on loopback. Its first request
is the row's prompt. Each request is answered with the policy's turn, and continues the dialogue
with what the policy is to read next. The episode is over when the agent returns its reward.

The dialogue can only grow: what was sampled stays as it was, as ids, and text never becomes ids of
a turn again. So a request that has another past than the policy's is an error, and how to sample
is for the params to say, not for a request.
"""

import asyncio
import inspect
import json
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stages.data.dialogue import Dialogue, transcript
from stages.data.offered_tools import tools_hash
from stages.environments.chat_server import GONE, OVER, Asked, ChatServer
from stages.environments.environment import Environment, NoAnswer, Observation
from stages.environments.spoken import Spoken
from stages.environments.threads import in_a_thread
from stages.environments.tool_calls import Call, before_calls, calls_in


@dataclass(frozen=True)
class _Told:
    """A message. Two are the same if clients may have written one of them anew."""

    role: str
    text: str
    calls: tuple[Mapping[str, Any], ...]

    @property
    def message(self) -> Mapping[str, Any]:
        """As data have it."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": self.role, "content": self.text, **calls}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Told) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.role, self.text.strip(), [call.get("id") for call in self.calls]


class ChatAgent(Environment):
    """One run of an agent; subclasses run it."""

    reads_ids: ClassVar[bool] = True

    _server: ClassVar[ChatServer] = ChatServer()
    _url = ""
    _running: "asyncio.Task[float]"
    _asked: "asyncio.Queue[Asked]"
    _pending: Asked | None = None
    """The request that waits for the policy."""
    _over = False

    @abstractmethod
    def run(self, base_url: str, row: Mapping[str, Any], seed: int) -> float | Awaitable[float]:
        """Run the agent against the API at `base_url`; the episode's reward. May be `async`.

        All randomness of the agent must come from the seed, as for every environment.
        """

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        self._row = row
        self._dialogue: list[_Told] = []
        self._turns = 0
        self._asked = asyncio.Queue()
        self._url = self._server.open(lambda asked: _soon(loop, self._receive, asked))
        self._running = loop.create_task(self._ran(row, seed))
        if not await self._next():
            raise NoAnswer("the agent returned before it asked the policy anything")
        self._check_first(self._pending_body())

    async def step(self, action: str) -> Observation:  # type: ignore[override]
        self._tell(action)
        if not await self._next():
            return Observation(reward=await self._running, done=True)
        return Observation(self._read_on(self._pending_body()))

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

    async def _next(self) -> bool:
        """Whether the agent asks again; False where it has ended."""
        asking = asyncio.ensure_future(self._asked.get())
        try:
            done, _ = await asyncio.wait(
                {asking, self._running}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asking.cancel()
        if asking not in done:
            self._running.result()
            return False
        self._pending = asking.result()
        return True

    def _pending_body(self) -> Mapping[str, Any]:
        """What the agent has asked, looked over."""
        assert self._pending is not None
        body = self._pending.body
        if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
            self._refuse("a request is an object with a list `messages`")
        for name, only in (("stream", False), ("n", 1), ("top_logprobs", 0)):
            if body.get(name) not in (None, only):
                self._refuse(f"`{name}` {body[name]!r} is not supported: leave it out")
        tools = body.get("tools") or ()
        if (tools_hash(tools) if tools else None) != self._row["extra"].get("tools"):
            self._refuse(
                "the request's `tools` are not those that the prompt offers: write them to a file "
                "of the data, and name it in prepare.tools"
            )
        return body

    def _check_first(self, body: Mapping[str, Any]) -> None:
        self._dialogue = self._told(body)
        messages = tuple(told.message for told in self._dialogue)
        # A question with tools of its own is shown as any other dialogue is.
        asked = {Dialogue(messages).text, transcript(messages)} if messages else set()
        if self._row["prompt"].strip() not in {text.strip() for text in asked}:
            self._refuse(
                f"the agent's first request is not the row's prompt {self._row['prompt']!r}: let "
                "it begin with the messages that the data have"
            )

    def _read_on(self, body: Mapping[str, Any]) -> str:
        """What is new in a dialogue for the policy to read."""
        told, known = self._told(body), len(self._dialogue)
        if told == self._dialogue[:-1]:
            self._refuse(
                "the agent asks the same again, before or after it was answered: an answer takes "
                "as long as all others of its unit, so let its client wait, without a timeout and "
                "retries"
            )
        for place, before in enumerate(self._dialogue):
            if place >= len(told) or told[place] != before:
                self._refuse(
                    f"message {place} of the request is not what was said before, and what the "
                    "policy has read cannot be changed: an episode is one dialogue that only grows"
                )
        new, self._dialogue = told[known:], told
        roles = [message.role for message in new]
        if {*roles} != {self.role}:
            self._refuse(
                f"a request continues the dialogue with messages of the role {self.role!r}, this "
                f"one with {roles}: set `role` of the class to another"
            )
        return "\n".join(message.text for message in new)

    def _tell(self, action: str) -> None:
        """Answer the agent with the policy's turn."""
        assert self._pending is not None
        message: dict[str, Any] = {"role": "assistant", "content": action}
        calls = calls_in(action) if self._pending.body.get("tools") else []
        if calls and all(isinstance(call, Call) for call in calls):
            message["content"] = before_calls(action) or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self._turns}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for number, call in enumerate(calls)
                if isinstance(call, Call)
            ]
        self._turns += 1
        self._dialogue.append(_told(message))
        self._pending.answer(
            message,
            "tool_calls" if "tool_calls" in message else "stop",
            action.sampled if isinstance(action, Spoken) else None,
        )
        self._pending = None

    def _told(self, body: Mapping[str, Any]) -> list["_Told"]:
        try:
            return [_told(message) for message in body["messages"]]
        except (AttributeError, KeyError, TypeError) as error:
            self._refuse(f"a message has a role and a text: {type(error).__name__}: {error}")
            raise

    def _refuse(self, why: str) -> None:
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


def _told(message: Mapping[str, Any]) -> _Told:
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part["type"] for part in content} - {"text"}
        if kinds:
            raise TypeError(f"a policy reads text alone, not {', '.join(sorted(kinds))}")
        content = "".join(part["text"] for part in content)
    return _Told(str(message["role"]), content, tuple(message.get("tool_calls") or ()))
