"""Messages one after another, and what they are called.

A message is what chat templates read: `role` (system, user, assistant or tool), `content`, and for
tools `tool_calls`, `tool_call_id` and `name`. A prompt is a dialogue up to where the assistant is
to speak. One question of a user goes by its text; any other dialogue is shown as a transcript, and
its id is that of all it holds, so that no text can be mistaken for a dialogue.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from stages.data.artifacts import canonical_json
from stages.data.seeds import content_id

Message = Mapping[str, Any]
REASONING = ("reasoning_content", "thinking")
"""What messages call what the assistant thinks before it speaks."""
_BETWEEN_WORDS = re.compile(r"[\s.,;:!?'\"‘’“”…]+")
# Unicode's Default_Ignorable_Code_Point: nobody sees them.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
_RAISED_OR_LOWERED = re.compile("([¹²³\u2070-\u209f]+)")


@dataclass(frozen=True)
class Dialogue:
    """Messages, and the tools that the assistant may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def text(self) -> str:
        """For people and for verifiers."""
        return self.messages[0]["content"] if self._is_a_question else transcript(self.messages)

    @cached_property
    def id(self) -> str:
        """The same for the same dialogue, whatever format it came in."""
        return content_id(self.text if self._is_a_question else self.content)

    @property
    def content(self) -> str:
        """All that it holds, as one text."""
        return canonical_json({"messages": self.messages, "tools": self.tools})

    @property
    def _is_a_question(self) -> bool:
        messages = self.messages
        return not self.tools and len(messages) == 1 and messages[0]["role"] == "user"


def asked(text: str) -> Dialogue:
    """One question of a user."""
    return Dialogue(({"role": "user", "content": text},))


def reply(text: str) -> Message:
    """A plain response."""
    return {"role": "assistant", "content": text}


def is_plain(message: Message) -> bool:
    """Whether a message is its text alone, with no call of a tool or reasoning beside it."""
    return message.keys() == {"role", "content"}


def transcript(messages: Sequence[Message]) -> str:
    """Messages as a text to read."""
    return "\n\n".join(f"{message['role']}: {spoken(message)}" for message in messages)


def spoken(message: Message) -> str:
    """What a message says, its calls of tools included."""
    calls = message.get("tool_calls")
    parts = [message.get("content") or "", canonical_json(calls) if calls else ""]
    return "\n".join(part for part in parts if part)


def response_text(messages: Sequence[Message]) -> str:
    """A response for people and verifiers: its words, or a transcript of several turns."""
    return spoken(messages[0]) if len(messages) == 1 else transcript(messages)


def normalised(text: str) -> str:
    """Without what hides a copy: case, whitespace, the punctuation of sentences, how it is encoded.

    Signs that bear meaning stay: 2+3 is not 2-3, 1+23 is not 12+3, and 2² is not 22.
    """
    words = text.casefold() if text.isascii() else _compatible(_compatible(text).casefold())
    return _BETWEEN_WORDS.sub(" ", words).strip() or text


def _compatible(text: str) -> str:
    """One spelling of what looks the same: composed, of usual width, nothing unseen in it."""
    parts = _RAISED_OR_LOWERED.split(_UNSEEN.sub("", text))
    parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
    return "".join(parts)


def digest(text: str) -> bytes:
    """128 bits of a text."""
    return blake2b(text.encode(), digest_size=16).digest()
