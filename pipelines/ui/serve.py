"""Serves the pages of a clone on loopback until it is interrupted, as `lockstep ui` does.

Where `lockstep up` serves them already, its link is printed instead.
"""

import socket
from contextlib import suppress

import uvicorn

from pipelines.base.browser import open_browser
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.servers.running import running
from pipelines.servers.settings import HOST, UI_PORT
from pipelines.ui.app import create_app
from pipelines.ui.clone import Clone, open_clone, token_of

CLOSING_S = 5
"""How long open pages may take to let go of a server that ends."""


def serve(repository: Repository, console: Console, port: int | None, *, browse: bool) -> None:
    """Print the link, and serve until Ctrl-C or SIGTERM, unless `lockstep up` serves already."""
    served = running(repository).get("ui")
    if served is not None and port is None:
        link = _say_link(repository, console, served.url)
        console.line(
            "`lockstep up` serves them, and `lockstep down` ends that; whoever has the link can "
            "run and cancel stages here"
        )
        if browse:
            open_browser(repository.home / "ui/open.html", link)
        return
    clone = open_clone(repository)
    listening = _listen(console, port)
    link = _say_link(repository, console, f"http://{HOST}:{listening.getsockname()[1]}")
    console.line("whoever has the link can run and cancel stages here; Ctrl-C ends the server")
    if browse:
        open_browser(repository.home / "ui/open.html", link)
    with suppress(KeyboardInterrupt):
        serve_at(clone, listening)
    console.line("the server has ended; stages that run go on")


def _say_link(repository: Repository, console: Console, address: str) -> str:
    link = f"{address}/#token={token_of(repository)}"
    console.line(f"the pages of {repository.root}:  {link}")
    return link


def serve_at(clone: Clone, listening: socket.socket) -> None:
    """Until the process is told to end; nothing is printed but what goes wrong."""
    app = create_app(clone)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=CLOSING_S,
    )
    with listening:
        server = uvicorn.Server(config)
        # Streams to open pages end by themselves.
        app.state.is_ending = lambda: server.should_exit
        server.run(sockets=[listening])


def _listen(console: Console, asked: int | None) -> socket.socket:
    """A socket at the requested port, which must be free; else at the default, or any free one."""
    try:
        return bound(UI_PORT if asked is None else asked)
    except OSError as error:
        if asked is not None:
            raise LockstepError(
                f"port {asked} cannot be used ({error.strerror}); choose another one with --port, "
                "or 0 for any free one"
            ) from None
    found = bound(0)
    console.line(f"port {UI_PORT} is in use; this server uses {found.getsockname()[1]}")
    return found


def bound(port: int) -> socket.socket:
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        # Whoever opens the link before the server is ready waits for it.
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening
