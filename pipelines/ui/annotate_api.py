"""The Annotate page: two responses at a time, which somebody compares without knowing their makers.

Always true: what is sent of a pair before it is judged has no policy, reward or seed in it, and an
annotator judges a pair once, however many tabs show it.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from pipelines.annotations import queue, store
from pipelines.annotations.judgement import Choice, Judgement, Response, annotator_name
from pipelines.annotations.pair import Pair
from pipelines.annotations.status import annotation_status
from pipelines.ui.clone import Clone


class Judged(BaseModel):
    """What somebody says of a pair."""

    model_config = ConfigDict(extra="forbid")

    annotator: str
    pair: str
    chosen: Choice
    note: str = ""


class Undone(BaseModel):
    """A judgement that its annotator takes back."""

    model_config = ConfigDict(extra="forbid")

    annotator: str
    judgement: str


def router(clone: Clone) -> APIRouter:
    api = APIRouter()

    @api.get("/next")
    def next_pair(annotator: str) -> dict[str, Any]:
        """The pair to show now, null where none is left, and how far this annotator is."""
        pair, progress = queue.next_pair(clone.root, annotator)
        name = annotator_name(annotator)
        shown = _blind(pair, name) if pair else None
        return {"annotator": name, "pair": shown, "progress": vars(progress)}

    @api.get("/status")
    def status() -> dict[str, Any]:
        return annotation_status(clone.root).as_json()

    @api.post("/judge")
    def judge(judged: Judged) -> dict[str, Any]:
        """Keep a judgement, and tell whose responses they were."""
        try:
            kept = queue.judge(
                clone.root, judged.annotator, judged.pair, judged.chosen, judged.note
            )
        except store.AlreadyJudged as error:
            return {"judgement": None, "message": str(error)}
        return {"judgement": _revealed(kept)}

    @api.post("/undo")
    def undo(undone: Undone) -> dict[str, Any]:
        """Take a judgement back, and show its pair again where the queue still has it."""
        judgement = store.withdraw(clone.root, undone.annotator, undone.judgement)
        pair = queue.read_queue(clone.root).get(judgement.origin.pair or "")
        return {"pair": _blind(pair, judgement.annotator) if pair else None}

    return api


def _blind(pair: Pair, annotator: str) -> dict[str, Any]:
    left, right = pair.sides(annotator)
    return {
        "id": pair.id,
        "messages": [_message(message) for message in pair.messages],
        "tools": [_tool_name(tool) for tool in pair.tools],
        "left": left.text,
        "right": right.text,
    }


def _revealed(judgement: Judgement) -> dict[str, Any]:
    return {
        "id": judgement.id,
        "chosen": judgement.chosen,
        "left": _maker(judgement.left),
        "right": _maker(judgement.right),
    }


def _maker(response: Response) -> dict[str, Any]:
    return {"policy": response.policy, "rewards": dict(response.rewards)}


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    """Who says what, calls of tools included, as text."""
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    if calls := message.get("tool_calls"):
        parts.append(json.dumps(calls, ensure_ascii=False))
    return {"role": str(message["role"]), "text": "\n".join(part for part in parts if part)}


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", "a tool"))
