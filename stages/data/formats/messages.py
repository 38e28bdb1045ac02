"""Dialogues as others write them, as messages that a chat template reads.

Lists of `{role, content}` (OpenAI, TRL) or `{from, value}` (ShareGPT), one such object, JSON text
of either (CSV has no other way), plain text, or `Human:`/`Assistant:` transcripts (HH-RLHF). What
is no dialogue raises `RowError`; whoever knows the row names its place.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from stages.data.artifacts import without_nulls
from stages.data.dialogue import REASONING, Message
from stages.data.row_error import RowError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_KEPT = ("tool_calls", "tool_call_id", "name", *REASONING)
_TURN = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
_PYTHON = re.compile(r"\s*\[\s*\{'(?:role|content)': ")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: Any, speaker: str) -> bool:
    """Whether a text is a dialogue written as `Human:` and `Assistant:` paragraphs.

    What a user asks may be one such paragraph; what an assistant answers is one only with both.
    """
    speakers = _TURN.findall(value) if isinstance(value, str) and _TURN.match(value) else []
    return speakers[:1] == ["Human"] and (speaker == "user" or "Assistant" in speakers)


def from_transcript(text: str) -> list[Message]:
    """The messages of a transcript; an `Assistant:` with nothing after it only asks for more."""
    _, *parts = _TURN.split(text)
    turns = [
        {"role": _SPEAKERS[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return list(turns)


def messages_of(value: Any, name: str, speaker: str) -> list[Message]:
    """The messages of a column; plain text is one message of `speaker`."""
    if is_transcript(value, speaker):
        return from_transcript(value)
    value = _parsed(value, name)
    if isinstance(value, str):
        return [{"role": speaker, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
        raise RowError(f"{name!r} is {_kind(value)}: write text or a list of messages")
    if not value:
        raise RowError(f"{name!r} has no messages: write some or drop the row")
    return [_message(item, name) for item in value]


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools that a row offers."""
    value = from_json(value, "tools")
    value = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
        raise RowError(f"'tools' is {_kind(value)}: write a list of tools")
    return tuple(without_nulls(as_json(item, "tools")) for item in value)


def _message(item: Mapping[str, Any], name: str) -> Message:
    if "from" in item and "role" not in item:
        speaker, content = item["from"], item.get("value")
    else:
        speaker, content = item.get("role"), item.get("content")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(
            f"{name!r} has a message of {speaker!r}: a message has a `role` (system, user, "
            "assistant, tool) and `content`, or `from` (system, human, gpt, function_call, "
            "observation) and `value`"
        )
    if item.get("weight") not in (None, 1):
        raise RowError(
            f"{name!r} has a message of weight {item['weight']!r}, and turns of the assistant are "
            "learnt alike: leave out the weight, or cut the dialogue"
        )
    kept = {key: without_nulls(as_json(item[key], name)) for key in _KEPT if item.get(key)}
    if speaker == "function_call":
        kept, content = {"tool_calls": as_json(content, name)}, ""
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls(from_json(kept["tool_calls"], f"{name}: tool_calls"), name)
    return {"role": role, "content": _words(content, name, optional="tool_calls" in kept), **kept}


def _words(content: Any, name: str, *, optional: bool) -> str:
    """A message's text; parts of text are joined, and pictures and the like are refused."""
    if content is None and optional:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
        raise RowError(f"{name!r} has a message with something other than text in it")
    if not isinstance(content, str):
        raise RowError(f"{name!r} has a message whose content is {_kind(content)}: write text")
    return content


def _calls(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Calls of tools as templates read them: a function's name, and its arguments as a mapping."""
    calls: list[Mapping[str, Any]] = []
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list):
        raise RowError(f"{name!r} has calls of tools that are {_kind(value)}: write a list of them")
    for call in value:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{name!r} has a call of a tool without the tool's name")
        arguments = from_json(function.get("arguments") or {}, f"{name}: arguments")
        if not isinstance(arguments, Mapping):
            raise RowError(f"{name!r} has a call whose arguments are {_kind(arguments)}: name each")
        named = {"id": call["id"]} if call.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append({"type": "function", **named, "function": function})
    return calls


def _parsed(value: Any, name: str) -> Any:
    """JSON text of messages, as CSV files have it; any other text is left."""
    if not (isinstance(value, str) and value.lstrip().startswith(("[", "{"))):
        return value
    if _PYTHON.match(value) and all(f"'{key}':" in value for key in ("role", "content")):
        raise RowError(
            f"{name!r} has messages as Python prints them (pandas writes lists so): write JSON"
        )
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    items = read if isinstance(read, list) else [read]
    if not all(isinstance(item, Mapping) for item in items):
        return value
    # One is enough: what is wrong with another is said of it.
    return read if any(map(_is_message, items)) else value


def _is_message(item: Mapping[str, Any]) -> bool:
    """Somebody's words: an object with a sender alone may be what a response is to look like."""
    has_content = bool(item.keys() & {"content", "tool_calls"})
    return ("role" in item and has_content) or {"from", "value"} <= item.keys()


def from_json(value: Any, name: str) -> Any:
    """JSON text as what it says, since CSV has nothing but text; any other value is left."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{name!r} is text that is not JSON ({error}): write the value itself, or its JSON"
        ) from None


def as_json(value: Any, name: str) -> Any:
    """A value that Parquet can hold and JSON cannot, as one that it can."""
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): as_json(item, name) for key, item in value.items()}
        case list() | tuple():
            return [as_json(item, name) for item in value]
        case date() | time() | timedelta() | Decimal():
            return str(value)
        case _:
            raise RowError(
                f"{name!r} holds {type(value).__name__}, which is no JSON: leave the column out "
                f"with `columns: {{{name}: null}}`"
            )


def _kind(value: Any) -> str:
    return type(value).__name__
