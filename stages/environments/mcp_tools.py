"""The tools of an MCP server, as an environment.

A turn with calls (tool_calls.py) is answered with what the tools say, in the order of the calls, a
line break between them. What a tool refuses, and what is wrong with a call, is told to the policy.
A turn without a call is the policy's answer and ends the episode.

The prompts have to list the tools that the server has: their hash, which prepare leaves in the row,
is compared when an episode begins.
"""

import asyncio
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from stages.data.offered_tools import tools_hash
from stages.environments.environment import Environment, NoAnswer, Observation, right_answer
from stages.environments.packages import require
from stages.environments.tool_calls import Call, Malformed, calls_in, without_reasoning
from stages.environments.tool_server import Address, Session


class McpTools(Environment):
    """One episode with the tools of a server. Subclasses say which server, and judge answers."""

    command: ClassVar[Sequence[str]] = ()
    """What starts the server, which speaks over stdin and stdout; it runs in the file's folder."""
    env: ClassVar[Sequence[str]] = ()
    """Names of environment variables that the command gets, besides PATH, HOME and their like."""
    url: ClassVar[str] = ""
    """Of a server that runs already (streamable HTTP); `${NAME}` stands for a variable."""
    headers: ClassVar[Mapping[str, str]] = {}
    """Of requests to the URL: {"Authorization": "Bearer ${SEARCH_TOKEN}"}."""
    tools: ClassVar[Sequence[str]] = ()
    """Names of the tools that the policy may call; () for all."""
    session_per_episode: ClassVar[bool] = False
    """For servers with state; with a command, each episode then has a process of its own."""
    listed: ClassVar[bool] = True
    """False where prompts say in their own words what the tools are: nothing is compared."""
    longest: ClassVar[int | None] = None
    """Characters of an observation; what is beyond is cut off."""
    role: ClassVar[str] = "tool"

    _own: Session | None = None
    """Of this episode alone."""
    _shared: ClassVar[dict[tuple[asyncio.AbstractEventLoop, type], Session]] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        require("mcp", "tools")

    def reward(self, row: Mapping[str, Any], answer: str) -> float:
        """Of the policy's answer; may be `async`. 1 where it equals the row's `answer`, else 0."""
        return float(answer == right_answer(row))

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:  # type: ignore[override]  # noqa: ARG002
        if type(self).reward is McpTools.reward:
            right_answer(row)
        self._row = row
        session = self._opened()
        offered = await self.offered(session)
        self._compare(row, session.address, offered)
        self._names = [tool["function"]["name"] for tool in offered]

    async def step(self, action: str) -> Observation:  # type: ignore[override]
        calls = calls_in(action)
        if calls:
            answers = [await self._answer(call) for call in calls]
            return Observation("\n".join(answers)[: self.longest])
        reward = self.reward(self._row, without_reasoning(action))
        if inspect.isawaitable(reward):
            reward = await reward
        return Observation(reward=reward, done=True)

    async def close(self) -> None:  # type: ignore[override]
        if self._own:
            await self._own.close()

    @classmethod
    async def offered(cls, session: Session) -> list[dict[str, Any]]:
        """The tools that the policy may call, as chat templates take them."""
        there = await session.tools()
        lacking = set(cls.tools) - {tool["function"]["name"] for tool in there}
        if lacking:
            raise NoAnswer(f"{session.address} has no tool {', '.join(sorted(lacking))}")
        return [tool for tool in there if not cls.tools or tool["function"]["name"] in cls.tools]

    @classmethod
    def address(cls) -> Address:
        file = sys.modules[cls.__module__].__file__
        return Address(
            command=cls.command,
            url=cls.url,
            headers=cls.headers,
            env=cls.env,
            folder=Path(str(file)).parent,
            stateful=cls.session_per_episode,
        )

    def _compare(
        self, row: Mapping[str, Any], address: Address, offered: Sequence[Mapping[str, Any]]
    ) -> None:
        if self.listed and row["extra"].get("tools") != tools_hash(offered):
            raise NoAnswer(
                f"{address} lists {', '.join(tool['function']['name'] for tool in offered)}, and "
                "the prompt was rendered with other tools, or none: write them anew with `python "
                "-m stages.environments.list_tools` and name the file in prepare.tools, or set "
                "`listed = False` where the prompts describe the tools themselves"
            )

    def _opened(self) -> Session:
        if self.session_per_episode:
            self._own = self._own or Session(self.address())
            return self._own
        for place in [place for place, session in self._shared.items() if not session.usable]:
            del self._shared[place]
        place = asyncio.get_running_loop(), type(self)
        if place not in self._shared:
            self._shared[place] = Session(self.address())
        return self._shared[place]

    async def _answer(self, call: Call | Malformed) -> str:
        if isinstance(call, Malformed):
            return f"error: {call.problem}"
        if call.name not in self._names:
            return f"error: there is no such tool, only {', '.join(self._names)}"
        result = await self._opened().call(call.name, call.arguments)
        return f"error: {result.text}" if result.is_error else result.text
