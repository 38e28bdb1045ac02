"""Completions over HTTP on loopback, in the form of OpenAI's API: one address per episode.

A request waits in a thread of its own until whoever opened the address answers it. The server is
there as long as an address is open.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from threading import Lock, Thread
from typing import Any

from stages.environments.agent_answers import MODEL, answer
from stages.environments.agent_requests import Route
from stages.environments.spoken import Sampled

BACKLOG = 1024
"""Connections that may wait: all episodes may begin at the same time."""
LOOK_S = 0.05
"""Between two looks at whether the server is to end."""
OK, BAD_REQUEST, NOT_FOUND, GONE = 200, 400, 404, 410
OVER = "this episode is over"


@dataclass(frozen=True)
class Asked:
    """A request for a completion."""

    route: Route
    body: Mapping[str, Any]
    _answer: Future[tuple[int, Mapping[str, Any]]] = field(default_factory=Future)

    def answer(self, message: Mapping[str, Any], sampled: Sampled | None = None) -> None:
        """With what the policy says, and what that was sampled as, as far as it is asked for."""
        self._answer.set_result((OK, answer(self.route, self.body, message, sampled)))

    def refuse(self, why: str, status: int = BAD_REQUEST) -> None:
        """With an error, which clients do not ask again after."""
        self._answer.set_result((status, _error(why)))

    def answered(self) -> tuple[int, Mapping[str, Any]]:
        """Wait for it."""
        return self._answer.result()


class ChatServer:
    """Started by the first address, ended after the last."""

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[Asked], None]] = {}
        self._server: _Server | None = None
        self._lock = Lock()

    def open(self, receive: Callable[[Asked], None]) -> str:
        """An address whose requests go to `receive`, in any thread."""
        with self._lock:
            if self._server is None:
                self._server = _Server(self._receivers)
                Thread(target=self._server.serve_forever, args=(LOOK_S,), daemon=True).start()
            # No other process on this machine is to guess it.
            key = token_urlsafe(16)
            self._receivers[key] = receive
            return f"http://127.0.0.1:{self._server.server_port}/{key}/v1"

    def shut(self, address: str) -> None:
        """Later requests to the address are refused."""
        with self._lock:
            self._receivers.pop(address.split("/")[-2], None)
            if self._server and not self._receivers:
                Thread(target=self._server.end, daemon=True).start()
                self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, receivers: Mapping[str, Callable[[Asked], None]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.receivers = receivers

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with suppress(ConnectionError):  # whoever asks has ended, be it between two requests
            super().handle()

    def do_GET(self) -> None:
        key, _, what = self.path.strip("/").partition("/")
        if what == "v1/models" and key in self._receivers:
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lockstep"}
            self._send(OK, {"object": "list", "data": [model]})
        else:
            self._send(NOT_FOUND, _error(f"there is no {self.path}"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key, _, what = self.path.strip("/").partition("/")
        receive = self._receivers.get(key)
        if what not in list(Route):
            self._send(NOT_FOUND, _error(f"there is no {what}, only {', '.join(Route)}"))
        elif receive is None:
            self._send(GONE, _error(OVER))
        else:
            try:
                asked = Asked(Route(what), json.loads(body))
            except ValueError as error:
                self._send(BAD_REQUEST, _error(f"the request is not JSON: {error}"))
                return
            receive(asked)
            self._send(*asked.answered())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are no news."""

    @property
    def _receivers(self) -> Mapping[str, Callable[[Asked], None]]:
        assert isinstance(self.server, _Server)
        return self.server.receivers

    def _send(self, status: int, said: Mapping[str, Any]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _error(why: str) -> Mapping[str, Any]:
    return {"error": {"message": why, "type": "invalid_request_error"}}
