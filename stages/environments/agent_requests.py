"""What an agent asks with: all that was said so far, and what the policy is to read next.

It is said as messages, as a text, or as ids. Whichever it is, the past can only grow: what the
policy has read and sampled stays as it was, so a request that has another past is refused, and only
what follows that past is new.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from stages.data.dialogue import Dialogue, transcript
from stages.data.offered_tools import tools_hash
from stages.environments.environment import Observation
from stages.environments.spoken import Sampled
from stages.environments.tool_calls import Call, before_calls, calls_in

SAME_AGAIN = (
    "the agent asks the same again, before or after it was answered: an answer takes as long as "
    "all others of its unit, so let its client wait, without a timeout and retries"
)


class Route(StrEnum):
    """Where requests go, after the address of an episode."""

    CHAT = "v1/chat/completions"
    COMPLETIONS = "v1/completions"
    GENERATE = "inference/v1/generate"
    """Of vLLM: ids in, ids out."""


class Refused(Exception):
    """A request that cannot be answered; the message says why."""


class Past(Protocol):
    """What was said so far, in one of the three ways."""

    def begin(self, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """The first request, which has to be the row's prompt."""

    def read_on(self, body: Mapping[str, Any], sampled: Sampled | None) -> Observation:
        """What is new in the next request, after a turn that was sampled as that."""

    def tell(self, action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The policy's turn, as a message that answers the request."""


ONLY: Mapping[Route, Mapping[str, Sequence[Any]]] = {
    Route.CHAT: {"stream": [False], "n": [1], "top_logprobs": [0], "prompt_logprobs": []},
    Route.COMPLETIONS: {
        **{name: [False] for name in ("stream", "echo")},
        **{name: [1] for name in ("n", "best_of")},
        **{name: [] for name in ("suffix", "prompt_logprobs", "prompt_embeds")},
        "logprobs": [0, 1],
    },
    Route.GENERATE: {"stream": [False], "features": [], "content_parts": []},
}
"""What may be asked for, where a server could do more."""
SAMPLING: Mapping[str, Sequence[Any]] = {"n": [1], "logprobs": [0, 1], "prompt_logprobs": []}
"""The same in `sampling_params` of vLLM."""


def past_for(route: Route, body: Any, role: str) -> Past:
    """An empty past, of the request's kind; Refused where it asks for what there is not."""
    if not isinstance(body, Mapping):
        raise Refused("a request is an object of JSON")
    _look_over(body, ONLY[route])
    if route is Route.CHAT:
        return Messages(role)
    if route is Route.GENERATE:
        if isinstance(asked := body.get("sampling_params"), Mapping):
            _look_over(asked, SAMPLING)
        return Ids()
    return Text() if isinstance(_prompt(body), str) else Ids()


@dataclass
class Messages:
    """A dialogue."""

    role: str
    """Of what it is continued with."""
    said: "list[_Told]" = field(default_factory=list)
    turns: int = 0
    tools: str | None = None
    """The hash of those that the prompt offers."""

    def begin(self, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self.tools = row["extra"].get("tools")
        self._check_tools(body)
        self.said = _all_told(body)
        messages = tuple(told.message for told in self.said)
        # A question with tools of its own is shown as any other dialogue is.
        asked = {Dialogue(messages).text, transcript(messages)} if messages else set()
        if row["prompt"].strip() not in {text.strip() for text in asked}:
            raise Refused(
                f"the agent's first request is not the row's prompt {row['prompt']!r}: let it "
                "begin with the messages that the data have"
            )

    def read_on(self, body: Mapping[str, Any], sampled: Sampled | None) -> Observation:  # noqa: ARG002
        self._check_tools(body)
        told, known = _all_told(body), len(self.said)
        if told == self.said[:-1]:
            raise Refused(SAME_AGAIN)
        for place, before in enumerate(self.said):
            if place >= len(told) or told[place] != before:
                raise Refused(
                    f"message {place} of the request is not what was said before, and what the "
                    "policy has read cannot be changed: an episode is one dialogue that only grows"
                )
        new, self.said = told[known:], told
        roles = [message.role for message in new]
        if {*roles} != {self.role}:
            raise Refused(
                f"a request continues the dialogue with messages of the role {self.role!r}, this "
                f"one with {roles}: set `role` of the class to another"
            )
        return Observation("\n".join(message.text for message in new))

    def tell(self, action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": action}
        calls = calls_in(action) if body.get("tools") else []
        if calls and all(isinstance(call, Call) for call in calls):
            message["content"] = before_calls(action) or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.turns}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for number, call in enumerate(calls)
                if isinstance(call, Call)
            ]
        self.turns += 1
        self.said.append(_told(message))
        return message

    def _check_tools(self, body: Mapping[str, Any]) -> None:
        tools = body.get("tools") or ()
        if (tools_hash(tools) if tools else None) != self.tools:
            raise Refused(
                "the request's `tools` are not those that the prompt offers: write them to a file "
                "of the data, and name it in prepare.tools"
            )


@dataclass
class Text:
    """The row's prompt, and after it turns and observations as they were said, one by one."""

    said: str = ""
    asked: str = ""
    """The latest request."""

    def begin(self, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self.asked = _prompt(body)
        if self.asked.strip() != row["prompt"].strip():
            raise Refused(
                f"the agent's first prompt is not the row's {row['prompt']!r}: leave the chat "
                "template to the policy, or give ids"
            )

    def read_on(self, body: Mapping[str, Any], sampled: Sampled | None) -> Observation:  # noqa: ARG002
        before, self.asked = self.asked, _prompt(body)
        if self.asked == before:
            raise Refused(SAME_AGAIN)
        if (place := _first_difference(self.asked, self.said)) < len(self.said):
            raise Refused(
                f"from character {place} on the prompt is not what was said before, "
                f"{self.said[place : place + 20]!r}, and what the policy has read cannot be "
                "changed: a prompt is the one before, the answer to it, and what is new"
            )
        return _new(Observation(self.asked[place:]))

    def tell(self, action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        self.said = self.asked + action
        return {"content": action}


class Ids:
    """All as ids: of the whole episode, or as the policy read it last, where old observations are
    elided."""

    def begin(self, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        ids, prompt = _ids(body), row.get("prompt_ids") or []
        if ids != prompt:
            raise Refused(
                "the ids of the agent's first request are not those of the row's prompt, from "
                f"place {_first_difference(ids, prompt)} on: it has them as row['prompt_ids']"
            )

    def read_on(self, body: Mapping[str, Any], sampled: Sampled | None) -> Observation:
        if sampled is None:
            raise Refused("nobody knows what the policy's turn was sampled as")
        ids, turn = _ids(body), sampled.turn
        pasts = [sampled.whole, [*sampled.context, *turn]]
        if any(ids == past[: len(past) - len(turn)] for past in pasts):
            raise Refused(SAME_AGAIN)
        # Where nothing is elided, both are the same.
        past = max(pasts, key=lambda past: _first_difference(ids, past))
        if (place := _first_difference(ids, past)) < len(past):
            did = "sampled" if place >= len(past) - len(turn) else "had read"
            there = f"is {ids[place]}" if place < len(ids) else "is left out"
            raise Refused(
                f"id {place} of the request {there}, and the policy {did} {past[place]} there, "
                "which cannot be changed: a request has all ids of before, those that were sampled "
                "too, and what is new after them"
            )
        return _new(Observation(ids=tuple(ids[place:])))

    def tell(self, action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        return {"content": action}


def _look_over(body: Mapping[str, Any], only: Mapping[str, Sequence[Any]]) -> None:
    for name, allowed in only.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise Refused(f"`{name}` {body[name]!r} is not supported: leave it out")


def _prompt(body: Mapping[str, Any]) -> Any:
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise Refused(f"a request has one prompt, not {len(prompt)}: ask one by one")
    return prompt[0]


def _ids(body: Mapping[str, Any]) -> list[int]:
    ids = body["token_ids"] if "token_ids" in body else _prompt(body)
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise Refused("a prompt is a text or a list of ids, `token_ids` a list of ids")
    return ids


def _new(observation: Observation) -> Observation:
    if not observation.text and not observation.ids:
        raise Refused("the request has nothing new for the policy to read")
    return observation


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    shorter = min(len(one), len(other))
    return next((n for n in range(shorter) if one[n] != other[n]), shorter)


@dataclass(frozen=True)
class _Told:
    """A message. Two are the same if clients may have written one of them anew."""

    role: str
    text: str
    calls: tuple[Mapping[str, Any], ...]

    @property
    def message(self) -> Mapping[str, Any]:
        """As data have it."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": self.role, "content": self.text, **calls}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Told) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.role, self.text.strip(), [call.get("id") for call in self.calls]


def _all_told(body: Mapping[str, Any]) -> list[_Told]:
    if not isinstance(body.get("messages"), list):
        raise Refused("a request is an object with a list `messages`")
    try:
        return [_told(message) for message in body["messages"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(f"a message has a role and a text: {type(error).__name__}: {error}") from None


def _told(message: Mapping[str, Any]) -> _Told:
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part["type"] for part in content} - {"text"}
        if kinds:
            raise TypeError(f"a policy reads text alone, not {', '.join(sorted(kinds))}")
        content = "".join(part["text"] for part in content)
    return _Told(str(message["role"]), content, tuple(message.get("tool_calls") or ()))
