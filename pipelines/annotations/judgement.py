"""One person's judgement of two responses to the same prompt, and all that made the two.

Left and right are the sides that the person saw. A judgement says by itself what was judged: its
texts, and the policy, seed and settings of each response, outlive rollouts and conversations.
"""

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Literal

from pydantic import ConfigDict

from pipelines.base.errors import LockstepError
from stages.data.seeds import content_id

_STRICT = ConfigDict(strict=True, extra="forbid")
LONGEST_NAME = 64


class Choice(StrEnum):
    """What a person said. A skip is no opinion; a tie is one."""

    LEFT = "left"
    RIGHT = "right"
    TIE = "tie"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response, and what made it."""

    __pydantic_config__ = _STRICT

    text: str
    policy: str
    """Its name, such as `sft` or `iter_002`."""
    policy_hash: str
    """The hash of the model's folder, as rollouts and dvc.lock have it."""
    seed: int | None = None
    """None: it was not drawn, but the likeliest one."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature, top-p and the like, by the names that params.yaml has for them."""
    sample_index: int | None = None
    """Which of the rollouts of its prompt it is; None: it is none."""
    step: int | None = None
    """Of an online run."""
    finish_reason: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What was recorded of it by reward source; under `reward`, what a policy learns from."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where two responses were shown to somebody."""

    __pydantic_config__ = _STRICT

    place: Literal["chat", "queue"]
    pair: str | None = None
    """The id of the prompt and the two texts (`pair.pair_id`): judged once by each person."""
    iteration: str | None = None
    """Whose rollouts the two are; None: answers to held-out prompts, or a chat."""
    prompt_id: str | None = None
    held_out: bool = False
    """Whether the prompt is held out, so that nothing may be trained on it."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One person's choice between two responses."""

    __pydantic_config__ = _STRICT

    messages: tuple[Mapping[str, Any], ...]
    """What both respond to, as `{role, content}`; one question is one message of a user."""
    left: Response
    right: Response
    chosen: Choice
    annotator: str
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the prompt offers to call."""
    answer: str | None = None
    """What a verifier compares with; null where the data have none."""
    note: str = ""
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    kind: Literal["judgement"] = "judgement"

    @cached_property
    def id(self) -> str:
        """A short name of all that it says."""
        return content_id(as_line(self))

    @property
    def preferred(self) -> Response | None:
        """The better one; None for a tie or a skip."""
        return {Choice.LEFT: self.left, Choice.RIGHT: self.right}.get(self.chosen)


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """A judgement that its annotator has taken back; it stays in the file."""

    __pydantic_config__ = _STRICT

    judgement: str
    """Its id."""
    annotator: str
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    kind: Literal["withdrawal"] = "withdrawal"


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def as_line(value: Any) -> str:
    """A value of a dataclass as one line of JSON; LockstepError where it cannot be written."""
    kind: Any = type(value)
    written = _adapter(kind).dump_python(value, warnings=False)
    try:
        text = json.dumps(written, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise LockstepError("a text holds half a character, which no file can: remove it") from None
    except (TypeError, ValueError) as error:
        raise LockstepError(f"a judgement cannot be written as JSON: {error}") from None
    return text


def from_line(text: str, kind: Any) -> Any:
    """The value of a line; ValueError says which field is wrong, and how."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None


def annotator_name(text: str) -> str:
    """The name as files have it: `Ann Lee` and `ann-lee` are one person.

    LockstepError where it has other characters than letters, digits, `.`, `_`, `@`, `-` and spaces.
    """
    name = "-".join(unicodedata.normalize("NFC", text).casefold().split())
    if not name or not name[0].isalnum() or not all(c.isalnum() or c in "._@-" for c in name):
        raise LockstepError(
            f"annotator {text!r}: a name begins with a letter or a digit, and has letters, digits, "
            "spaces and . _ @ - in it"
        )
    if len(name) > LONGEST_NAME:
        raise LockstepError(f"annotator {text!r}: a name has at most {LONGEST_NAME} characters")
    return name


def checked(judgement: Judgement) -> Judgement:
    """The judgement as it is read back; LockstepError says what is wrong with it."""
    messages = judgement.messages
    if not messages or messages[-1].get("role") == "assistant":
        raise LockstepError(
            "a judgement needs messages that end with what the two responses answer"
        )
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise LockstepError("each message of a judgement needs a `role` and its `content`")
    if judgement.left.text == judgement.right.text:
        raise LockstepError("the two responses are the same text: there is nothing to prefer")
    named = replace(judgement, annotator=annotator_name(judgement.annotator))
    try:
        read: Judgement = from_line(as_line(named), Judgement)
    except ValueError as error:
        raise LockstepError(f"a judgement is not as it should be: {error}") from None
    return read
