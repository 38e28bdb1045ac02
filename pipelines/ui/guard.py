"""Who may ask a server of pages, and for what: every request passes here first.

Loopback is open to every page that the user's browser shows and to every user of the machine. So a
request must name a loopback host (another name that resolves to it is a page of somebody else),
must not come from a page of another origin, and needs the token to change anything. What is
answered may be used by these pages alone: they load, run and send nothing elsewhere.
"""

import secrets
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READING = ("GET", "HEAD")
TOKEN_HEADER = "x-lockstep-token"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """Middleware around all pages; it passes streams on as they come."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no page uses a websocket

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        reason = refusal(scope["method"], scope["headers"], self._token)
        answer = self._app if reason is None else JSONResponse({"error": reason}, 403)
        await answer(scope, receive, send_guarded)


def refusal(method: str, headers: Iterable[tuple[bytes, bytes]], token: str) -> str | None:
    """Why a request is refused, in words for its page; None if it is not."""
    given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    host = given.get("host", "")
    if not _is_loopback(host):
        return "this server answers to 127.0.0.1 and localhost alone; use one of these names"
    origin = given.get("origin")
    if origin is not None and origin != f"http://{host}":
        return "refused: the request comes from a page of another server"
    from_elsewhere = given.get("sec-fetch-site") in ("cross-site", "same-site")
    if from_elsewhere and given.get("sec-fetch-mode") != "navigate":
        return "refused: the request comes from a page of another server"
    if method in READING:
        return None
    sent = given.get(TOKEN_HEADER, "").encode()
    if not secrets.compare_digest(sent, token.encode()):
        return (
            "this tab may only look: open the link that `lockstep ui` printed, which holds the "
            "token, to change something"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname in LOOPBACK and parts.netloc == host and "@" not in host
    except ValueError:
        return False
