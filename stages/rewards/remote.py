"""One request to a reward server, with retries.

Hope is after 429, 5xx, a lost connection and a timeout: the next try waits, twice as long each
time, or as long as the server says (Retry-After). Anything else is final, and the message has the
first line of what the server said. The token comes from the environment, goes to the named address
only (redirections are not followed) and is in no message.
"""

import email.utils
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from stages.context import StageError
from stages.contracts.rewards import Remote
from stages.rewards.timed_http import timed_opener

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
LOOK_INTERVAL_S = 0.2
LONGEST_ANSWER = 64 << 20
SHOWN = 200


class GivenUp(Exception):
    """Nobody waits for the answer any more."""


class NoAnswer(Exception):
    """The server did not answer as it should; the message says how, without the row."""


class _Again(Exception):
    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Server:
    """A server by the params of one source."""

    def __init__(self, name: str, params: Remote, path: str = "") -> None:
        self.url = params.url.rstrip("/") + path
        self._params = params
        self._token = _token(name, params.token_variable)
        self._opener = timed_opener(_NoRedirections)

    def ask(self, message: Mapping[str, Any], given_up: Callable[[], bool]) -> Any:
        """The answer's JSON; NoAnswer where there is none."""
        wait = FIRST_WAIT_S
        for tries in range(self._params.retries + 1):
            try:
                return self._once(json.dumps(message).encode())
            except _Again as again:
                reason = str(again)
                if tries == self._params.retries:
                    break
                _sleep(
                    min(again.wait if again.wait is not None else wait, LONGEST_WAIT_S), given_up
                )
                wait = min(2 * wait, LONGEST_WAIT_S)
        times = f"{self._params.retries + 1} times" if self._params.retries else "once"
        raise NoAnswer(f"{self.url} was asked {times}, at last {reason}")

    def _once(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._params.timeout) as answer:
                read = _read(answer)
        except urllib.error.HTTPError as error:
            with error:
                shown = self._first_line(error)
            reason = f"it answered {error.code} {self.shown(str(error.reason))}{shown}"
            if error.code == 429 or error.code >= 500:
                raise _Again(reason, _retry_after(error.headers.get("Retry-After"))) from None
            raise NoAnswer(f"{self.url}: {reason}{_advice(error.code)}") from None
        except (TimeoutError, urllib.error.URLError) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise _Again(f"it did not answer within {self._params.timeout:g} s") from None
            raise _Again(f"there was no connection ({cause})") from None
        except (OSError, http.client.HTTPException) as error:
            shown = self.shown(str(error))
            raise _Again(f"the connection broke ({type(error).__name__}: {shown})") from None
        try:
            return json.loads(read)
        except (ValueError, RecursionError):
            shown = self.shown(read.decode(errors="replace"))
            raise NoAnswer(f"{self.url} answered no JSON: {shown!r}") from None

    def shown(self, text: str) -> str:
        """A server's text as messages show it: not too much, and never the token."""
        return (text.replace(self._token, "***") if self._token else text)[:SHOWN]

    def _first_line(self, error: urllib.error.HTTPError) -> str:
        try:
            text = _read(error).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException):
            return ""
        line = self.shown(text.partition("\n")[0])
        return f": {line}" if line else ""


def _read(answer: Any) -> bytes:
    """The whole body."""
    parts: list[bytes] = []
    while part := answer.read1(1 << 16):
        parts.append(part)
        if sum(map(len, parts)) > LONGEST_ANSWER:
            raise NoAnswer(f"{answer.url} answered more than {LONGEST_ANSWER >> 20} MB")
    body = b"".join(parts)
    promised = answer.headers.get("Content-Length", "")
    if promised.isdecimal() and len(body) < int(promised):
        raise http.client.IncompleteRead(body, int(promised) - len(body))
    return body


def _token(name: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise StageError(
            f"rewards.{name}.token_variable names {variable}, which is not set where the stage "
            "runs: export it, or have the profile pass it on"
        )
    if not (token.isascii() and token.isprintable()):
        raise StageError(
            f"the token in {variable}, which rewards.{name}.token_variable names, has characters "
            "that no HTTP header can have, such as a line break: export it again"
        )
    return token


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, from seconds or a date."""
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    # A date without a zone is in UTC, as all dates of HTTP are.
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((date - datetime.now(UTC)).total_seconds(), 0.0)


def _advice(code: int) -> str:
    if code in (401, 403):
        return " (is the token in `token_variable` right?)"
    return " (a redirection, which is not followed: set `url` to its end)" if code < 400 else ""


def _sleep(seconds: float, given_up: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if given_up():
            raise GivenUp
        time.sleep(min(left, LOOK_INTERVAL_S))
