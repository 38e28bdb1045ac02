"""Redaction of addresses and streams; what is a secret is said in `stages.redaction`."""

import re
from typing import IO, Any

from stages.redaction import USERINFO, Redaction, redact

__all__ = ["RedactedStream", "Redaction", "redact", "without_credentials"]


def without_credentials(address: str) -> str:
    """The address without its user part."""
    return re.sub(rf"{USERINFO}@", "", address)


class RedactedStream:
    """A text stream that redacts what is written to it, line by line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
