"""A session with an MCP server: what it lists, and calls of its tools.

A session belongs to the task that opened it, so each has a task of its own, which many episodes
share. It is closed when nobody needs it, or when the loop's tasks are cancelled at the end. Secrets
come from environment variables; no error shows their values.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.environments.environment import NoAnswer
from stages.environments.variables import filled, redacted, value_of


@dataclass(frozen=True)
class Address:
    """Where a server is: a command to start, or a URL."""

    command: Sequence[str] = ()
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    env: Sequence[str] = ()
    """Names of variables that the command's process gets, besides PATH, HOME and their like."""
    folder: Path = Path()
    """Where the command runs."""
    stateful: bool = False
    """Whether the server keeps state of a session."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise NoAnswer("an MCP server has either a `command` or a `url`: set one of the two")

    def __str__(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)}"

    def redacted(self, text: str) -> str:
        """A text without the values of the variables that the server is given."""
        return redacted(text, [self.url, *self.headers.values()], self.env)


@dataclass(frozen=True)
class Result:
    """What a tool has answered."""

    text: str
    is_error: bool


class Session:
    """An open session; made on the loop that it is used on."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.usable = True
        """False after a failure: whoever comes next needs another session."""
        self._asked = 0
        self._refusal = ""
        """The last request's HTTP status, where it is an error: the client does not say it."""
        self._unneeded = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[tuple[Any, Sequence[Any]]] = loop.create_future()
        self._task = loop.create_task(self._keep())

    async def tools(self) -> list[dict[str, Any]]:
        """What chat templates take, by name."""
        _, tools = await self._ready()
        functions = [
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            for tool in sorted(tools, key=lambda tool: str(tool.name))
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """NoAnswer where the server has failed; what the tool refuses is a result."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import INVALID_PARAMS

        client, _ = await self._ready()
        self._asked += 1
        try:
            answer = await client.call_tool(name, dict(arguments))
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return Result(self.address.redacted(str(error)), is_error=True)
            self.usable = False
            raise self._failed(error) from None
        finally:
            self._asked -= 1
            self._close_if_unneeded()
        kinds = {part.type for part in answer.content} - {"text"}
        if kinds:
            raise NoAnswer(
                f"{self.address}: its tool {name} answered with content of type "
                f"{', '.join(sorted(kinds))}, and a policy reads text alone"
            )
        text = "\n".join(part.text for part in answer.content)
        return Result(self.address.redacted(text) if answer.is_error else text, answer.is_error)

    async def close(self) -> None:
        """Once what is asked is answered."""
        self.usable = False
        self._close_if_unneeded()
        if not self._asked:
            await asyncio.wait({self._task})

    def give_up(self) -> None:
        """Close it, whatever is asked."""
        self._task.cancel()

    def _close_if_unneeded(self) -> None:
        if not self.usable and not self._asked:
            self._unneeded.set()

    async def _ready(self) -> tuple[Any, Sequence[Any]]:
        # Who waits for it may be cancelled; the others still need it.
        return await asyncio.shield(self._opened)

    async def _keep(self) -> None:
        try:
            async with _connected(self.address, self._note) as client:
                tools = await _listed(client)
                if not self._opened.done():
                    self._opened.set_result((client, tools))
                await self._unneeded.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(self._failed(error))
                self._opened.exception()  # it may be that nobody waits for it any more
        finally:
            self.usable = False
            self._opened.cancel()

    def _failed(self, error: BaseException) -> NoAnswer:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, NoAnswer):
            return error
        log = "; what it wrote is in the log of the stage" if self.address.command else ""
        why = f"{type(error).__name__}: {error}{self._refusal}{log}"
        return NoAnswer(self.address.redacted(f"{self.address}: {why}"))

    async def _note(self, response: Any) -> None:
        self._refusal = f" (HTTP {response.status_code})" if response.is_error else ""


@asynccontextmanager
async def _connected(
    address: Address, note: Callable[[Any], Awaitable[None]]
) -> AsyncIterator[Any]:
    import httpx2
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with AsyncExitStack() as stack:
        if address.command:
            program, *arguments = address.command
            # The folder is an input of the stage: nothing may be left in it.
            env = {"PYTHONDONTWRITEBYTECODE": "1", **{name: value_of(name) for name in address.env}}
            started = StdioServerParameters(
                command=program, args=arguments, env=env, cwd=address.folder
            )
            transport = stdio_client(started)
        else:
            # Time limits, and how many calls there are at a time, are those of the episodes.
            http = httpx2.AsyncClient(
                headers={name: filled(value) for name, value in address.headers.items()},
                timeout=httpx2.Timeout(None),
                limits=httpx2.Limits(max_connections=None),
                event_hooks={"response": [note]},
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(filled(address.url), http_client=http)
        # Over HTTP only the older protocol has sessions.
        mode = "legacy" if address.stateful else "auto"
        yield await stack.enter_async_context(Client(transport, mode=mode))


async def _listed(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools
