"""Redaction: text that leaves a process passes through `redact`, which removes secrets.

Both planes use it: it imports nothing of either.

A variable is secret by its name, or by a value that looks like a secret: an API key of a large
provider, the address of a webhook, an address with a signature in it.
"""

import os
import re
from collections.abc import Mapping
from functools import lru_cache

_SECRET_NAME = re.compile(
    r"token|secret|pass(w|phrase|code)|(^|_|db)pass(_|$)|_pwd$|credential|cookie|webhook|bearer|"
    r"authorization|_auth(_|$)|_pat$|_dsn$|connection_?string|"
    r"(api|ssh|access|account|private)_?key|_key(_|$)|^key$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"^https?://\S*hook|[?&](sig|signature|token|key|api_?key|x-amz-signature)=|"
    r"^(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[a-z]-|npm_|pypi-|nvapi-|AKIA|AIza|ya29\.|eyJ)"
    r"[\w.~+/=-]{12,}$|-----BEGIN [A-Z ]*PRIVATE KEY",
    re.IGNORECASE,
)
USERINFO = r"(?<=://)[^/\s@]+(?=@)"
_LONGEST_USERINFO = 1000
_BEGUN_ADDRESS = re.compile(rf"(:/?|://[^/\s@]{{0,{_LONGEST_USERINFO}}})\Z", re.ASCII)
_SHORTEST = 6


class Redaction:
    """Replaces the secrets of one environment, and the user part of addresses, by stars."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._secrets = _secrets(environment)
        self._found = re.compile("|".join([USERINFO, *map(re.escape, self._secrets)]), re.ASCII)

    def __call__(self, text: str) -> str:
        return self._found.sub("***", text)

    def settled(self, text: str) -> int:
        """How many characters of a partial text can be redacted now: no secret spans the end."""
        end = len(text)
        for secret in self._secrets:
            begun = (n for n in range(len(secret) - 1, 0, -1) if text.endswith(secret[:n]))
            end = min(end, len(text) - next(begun, 0))
        if address := _BEGUN_ADDRESS.search(text, max(len(text) - _LONGEST_USERINFO - 3, 0)):
            end = min(end, address.start())
        for match in self._found.finditer(text):
            if match.start() < end < match.end():
                end = match.start()
        return end


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text without the secrets of this environment."""
    return Redaction(environment)(text)


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable whose secret the text has; None: it has no secret of this environment."""
    if len(text) < _SHORTEST:
        return None
    found = (name for secret, name in _secrets(environment).items() if secret in text)
    return next(found, None)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Each with its variable; the longest first: one may be a prefix of another. A multi-line key
    is one per line."""
    lines = {
        line.strip(): name
        for name, value in environment.items()
        if _is_secret(name, value)
        for line in value.splitlines()
    }
    kept = sorted((line for line in lines if len(line) >= _SHORTEST), key=lambda s: (-len(s), s))
    return {line: lines[line] for line in kept}


@lru_cache(maxsize=1024)
def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
