"""`notify` of a profile: who is told when a stage fails, warns or ends.

A profile is in git, so it holds no secrets: an address or a password that is one is written as
`$NAME`. When a message is sent, its value is taken from the environment of the command that started
the background process which sends it.
"""

import os
import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from stages.contracts.base import Section

_VARIABLE = re.compile(r"\$\{?(\w+)\}?", re.ASCII)


class NotifyOn(StrEnum):
    """What somebody is told of."""

    FAILED = "failed"
    """A stage failed or died, and is not tried again."""
    WARNING = "warning"
    """A stage's numbers give reason to warn; each kind once."""
    ENDED = "ended"
    """A stage was computed."""


def _only_a_variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError("a password does not belong in a profile: write $NAME, of a variable")
    return text


class Email(Section):
    """A message through a mail server."""

    host: str
    """Host name of the SMTP server."""
    port: int = Field(default=25, ge=1, le=65535)
    """Port of the SMTP server; 587 is usual with `starttls`, 465 with `tls`."""
    sender: str
    """Address that the message is from."""
    to: list[str] = Field(min_length=1)
    """Addresses that get the message."""
    starttls: bool = False
    """Whether to encrypt the connection by STARTTLS."""
    tls: bool = False
    """Whether the server expects TLS from the start."""
    user: str | None = None
    """User name, if the server wants one; may be $NAME."""
    password: Annotated[str, AfterValidator(_only_a_variable)] | None = None
    """$NAME of the variable that has the password."""


class Notify(Section):
    """Who is told of what. Several ways may be given; each gets every message."""

    on: list[Annotated[NotifyOn, Field(strict=False)]] = Field(
        default=[NotifyOn.FAILED, NotifyOn.WARNING], min_length=1
    )
    """Of what: `failed`, `warning`, `ended`."""
    webhook: str | None = Field(default=None, pattern=r"^(https?://.+|\$\w+|\$\{\w+\})$")
    """Address that gets a POST with JSON; $NAME if it is a secret, as Slack's are (not checked)."""
    command: str | None = Field(default=None, min_length=1)
    """Shell command that gets the JSON on its standard input."""
    email: Email | None = None
    """A message through a mail server."""

    @property
    def variables(self) -> list[str]:
        """The names of all variables that it needs."""
        email = self.email
        texts = (self.webhook, *((email.user, email.password) if email else ()))
        return [name for text in texts if text for name in _VARIABLE.findall(text)]

    @property
    def ways(self) -> list[str]:
        """What is given, without anything that could be a secret."""
        email = f"email to {', '.join(self.email.to)}" if self.email else None
        webhook = "webhook" if self.webhook else None
        return [way for way in (webhook, "command" if self.command else None, email) if way]


def set_variables(texts: list[bytes]) -> list[str]:
    """The variables that are named in texts and set here; their names only."""
    named = {name for text in texts for name in _VARIABLE.findall(text.decode(errors="replace"))}
    return sorted(name for name in named if os.environ.get(name))


def filled_in(text: str) -> str:
    """With the values of variables; KeyError for one that is not set."""
    return _VARIABLE.sub(lambda name: os.environ[name[1]], text)
