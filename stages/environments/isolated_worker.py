"""The process that environments run in: it reads lines of JSON and answers each with one.

The first line says which environment, {"environment": name, "folder": path}. Each line after it
names an episode and says what is asked of its environment: {"reset": [row, seed]} makes a new one,
{"step": action} and {"close": true} go to the one that is there. Answers are {"observation": ...},
{"done": true}, or {"refused": reason}.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.environments.environment import Environment, Observation
from stages.environments.loading import find
from stages.environments.spoken import from_json
from stages.rewards.isolated_worker import Answer, Refusal, serve


def _open(order: Mapping[str, Any]) -> Answer:
    try:
        make = find(order["environment"], Path(order["folder"]))
    except StageError as error:
        raise Refusal(str(error)) from None
    playing: dict[int, Environment] = {}
    # One loop for all episodes: a client that the module keeps belongs to it.
    loop = asyncio.Runner()

    def called(method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            returned = method(*arguments)
            return loop.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
        except BaseException as error:
            # SystemExit, too: it is the episode that ends, not the process.
            raise Refusal(f"{type(error).__name__}: {error}") from error

    def answer(message: Mapping[str, Any]) -> Mapping[str, Any]:
        episode = message["episode"]
        if "reset" in message:
            row, seed = message["reset"]
            playing[episode] = called(make)
            try:
                called(playing[episode].reset, row, seed)
            except Refusal:
                called(playing.pop(episode).close)
                raise
        elif "step" in message:
            return _as_json(called(playing[episode].step, from_json(message)))
        else:
            called(playing.pop(episode).close)
        return {"done": True}

    return answer


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _as_json(observed: Any) -> Mapping[str, Any]:
    """Where it is no observation, its type: whoever asked says what is wrong."""
    if not isinstance(observed, Observation):
        raise Refusal(f"it answered with {type(observed).__name__}, not with an Observation")
    try:
        return {"observation": {**asdict(observed), "reward": float(observed.reward)}}
    except (TypeError, ValueError) as error:
        raise Refusal(f"its reward is {observed.reward!r}: {error}") from None


if __name__ == "__main__":
    serve(_open)
