"""Calls of tools in what a policy says, in the form of Hermes and Qwen.

    <tool_call>{"name": "search", "arguments": {"query": "Rome"}}</tool_call>

A turn may have several. What comes before `</think>` is reasoning: a call that is only thought of
is none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_REASONED = "</think>"


@dataclass(frozen=True)
class Call:
    """One tool, and what it is called with."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """What is wrong with a call, for the policy to read."""

    problem: str


def without_reasoning(turn: str) -> str:
    """What is said after the reasoning."""
    return turn.rpartition(_REASONED)[2].strip()


def before_calls(turn: str) -> str:
    """What is said before the first call, with the reasoning."""
    return turn[: turn.find(OPEN, max(turn.rfind(_REASONED), 0))].strip()


def calls_in(turn: str) -> list[Call | Malformed]:
    """The calls of a turn, in their order; none where it is an answer."""
    said = without_reasoning(turn)
    calls: list[Call | Malformed] = []
    start = said.find(OPEN)
    while start >= 0:
        start += len(OPEN)
        call, end = _call_at(said, start)
        calls.append(call)
        start = said.find(OPEN, end)
    return calls


def _call_at(said: str, start: int) -> tuple[Call | Malformed, int]:
    """The call that begins there, and where to look for the next one."""
    begin = start + len(said[start:]) - len(said[start:].lstrip())
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(said, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return Malformed(f"this call is not JSON: {error}"), start
    if not said[end:].lstrip().startswith(CLOSE):
        return Malformed(f"this call does not end with {CLOSE}"), end
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed('a call is {"name": ..., "arguments": {...}}'), end
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Malformed("the arguments of a call are an object"), end
    return Call(value["name"], arguments), end


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a value of JSON")
