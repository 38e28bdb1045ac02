"""An MCP server for the tests: over stdin and stdout, or at a port, which asks for a token."""

import asyncio
import os
import sys
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")
calls = 0
waiting = 0


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often this was asked of this process."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
async def meet(number: int) -> str:
    """Answers once so many ask at the same time."""
    global waiting
    waiting += 1
    while waiting < number:
        await asyncio.sleep(0.01)
    return f"{number} are here"


@server.tool()
def refuse() -> str:
    """Always an error, which shows what the server was given."""
    raise ToolError(f"not with {os.environ.get('TESTS_TOKEN')}")


@server.tool()
def draw() -> Image:
    """A picture."""
    return Image(data=b"GIF89a", format="gif")


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.sleep(4000)
    return ""


@server.tool()
def environment() -> str:
    """The names of the variables here."""
    return " ".join(sorted(os.environ))


@server.tool()
def die(file: str) -> str:
    """Ends the server, unless there is the file."""
    if Path(file).exists():
        return "alive"
    Path(file).touch()
    os._exit(3)


def guarded(app):
    async def guard(scope, receive, send):
        headers = dict(scope.get("headers", []))
        wanted = f"Bearer {os.environ['TESTS_TOKEN']}".encode()
        if scope["type"] == "http" and headers.get(b"authorization") != wanted:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return guard


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        app = guarded(server.streamable_http_app())
        uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
