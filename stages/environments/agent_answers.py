"""What an agent is answered, in the form of the servers that its client knows: OpenAI's and vLLM's.

Ids and log-probs are those of the rollout. As of vLLM's `return_tokens_as_token_ids`, a token is
called by its id: it may be half a character.
"""

from collections.abc import Mapping
from typing import Any

from stages.environments.agent_requests import Route
from stages.environments.spoken import Sampled

MODEL = "policy"
"""What the model is called; a request may ask for any."""
_OBJECTS = {Route.CHAT: "chat.completion", Route.COMPLETIONS: "text_completion"}


def answer(
    route: Route, body: Mapping[str, Any], message: Mapping[str, Any], sampled: Sampled | None
) -> Mapping[str, Any]:
    """The policy's turn, and what it was sampled as, as far as that is asked for and known."""
    reason = "tool_calls" if "tool_calls" in message else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    said: dict[str, Any] = {"created": 0, "model": MODEL, "choices": [choice]}
    said |= {"id": "episode", "object": _OBJECTS.get(route, "generate"), "request_id": "episode"}
    if route is Route.CHAT:
        choice["message"] = message
    elif route is Route.COMPLETIONS:
        choice |= {"text": message["content"], "logprobs": None}
    if sampled is None:
        return said
    context, turn = sampled.context, sampled.turn
    counts = {"prompt_tokens": len(context), "completion_tokens": len(turn)}
    said["usage"] = {**counts, "total_tokens": len(context) + len(turn)}
    if _asks_for_logprobs(route, body):
        choice["logprobs"] = _logprobs(route, sampled)
    if body.get("return_token_ids"):
        # Where vLLM puts the prompt's depends on the route.
        (choice if route is Route.COMPLETIONS else said)["prompt_token_ids"] = context
    if body.get("return_token_ids") or route is Route.GENERATE:
        choice["token_ids"] = turn
    return said


def _asks_for_logprobs(route: Route, body: Mapping[str, Any]) -> bool:
    """In chats by a flag; else by a number, of which 0 asks for those that were sampled alone."""
    if route is Route.CHAT:
        return bool(body.get("logprobs"))
    asked = body.get("sampling_params") or {} if route is Route.GENERATE else body
    return asked.get("logprobs") is not None


def _logprobs(route: Route, sampled: Sampled) -> Mapping[str, Any]:
    names = [f"token_id:{id}" for id in sampled.turn]
    logprobs = sampled.turn_logprobs
    if route is Route.COMPLETIONS:
        unknown = {"top_logprobs": None, "text_offset": None}
        return {"tokens": names, "token_logprobs": logprobs, **unknown}
    none: Mapping[str, Any] = {"bytes": None, "top_logprobs": []}
    pairs = zip(names, logprobs, strict=True)
    return {"content": [{"token": name, "logprob": each, **none} for name, each in pairs]}
