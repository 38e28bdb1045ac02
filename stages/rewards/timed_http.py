"""HTTP with one deadline for the whole exchange, from the connection to the last byte.

Python's own timeout is for each piece that comes: a server that sends a header now and then, one
`100 Continue` after another, or a chunk that never begins, would keep its caller for ever. Here
each read and each write may take what is left until the deadline. Only the lookup of a host's name
takes as long as the system lets it.
"""

import http.client
import socket
import ssl
import time
import urllib.request
from typing import Any


def timed_opener(*handlers: Any) -> urllib.request.OpenerDirector:
    """Opens requests; TimeoutError, or a URLError because of one, where a deadline has passed."""
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    return urllib.request.build_opener(_Http, _Https(context=context), *handlers)


class _Timed:
    """A socket's part."""

    deadline: float

    def take_what_is_left(self, share: int = 1) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left / share)  # type: ignore[attr-defined]

    def recv_into(self, *where: Any) -> int:
        self.take_what_is_left()
        return super().recv_into(*where)  # type: ignore[misc, no-any-return]

    def send(self, *data: Any) -> int:
        self.take_what_is_left()
        return super().send(*data)  # type: ignore[misc, no-any-return]

    def sendall(self, *data: Any) -> None:
        self.take_what_is_left()
        super().sendall(*data)  # type: ignore[misc]


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


class _Connection:
    """A connection's part: it exists for one exchange."""

    def __init__(self, host: str, **settings: Any) -> None:
        super().__init__(host, **settings)  # type: ignore[call-arg]
        self._deadline = time.monotonic() + settings["timeout"]
        self._create_connection = self._reach

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.deadline = self._deadline  # type: ignore[attr-defined]

    def _reach(self, address: tuple[str, int], *_: Any) -> _Socket:
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for number, (*kind, _name, where) in enumerate(addresses):
            reached = _Socket(*kind)
            reached.deadline = self._deadline
            try:
                # An address that swallows what it is sent leaves time for the others.
                reached.take_what_is_left(len(addresses) - number)
                reached.connect(where)
                reached.take_what_is_left()  # for what follows, such as the keys of TLS
            except OSError:
                reached.close()
                if number + 1 == len(addresses):
                    raise
            else:
                return reached
        raise OSError(f"{address[0]} has no address")


class _HttpConnection(_Connection, http.client.HTTPConnection):
    pass


class _HttpsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, request, context=self._context)  # type: ignore[attr-defined]
