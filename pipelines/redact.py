"""Secrets of the environment stay there: text that leaves a process passes through `redact`."""

import os
import re
from collections.abc import Mapping
from typing import IO, Any

_SECRET_NAME = re.compile(
    r"token|secret|pass(w|phrase)|credential|(api|ssh|access)_?key|_key(_|$)|^key$|_pat$|_auth$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST = 6


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace the values of secret-looking variables, and the user part of addresses, by stars."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return _USERINFO.sub("***@", text)


def without_credentials(address: str) -> str:
    """The address without its user part."""
    return _USERINFO.sub("", address)


class RedactedStream:
    """A text stream that redacts what is written to it, line by line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
