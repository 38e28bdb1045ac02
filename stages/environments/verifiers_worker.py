"""The process that plays environments of verifiers, in the Python environment that has them.

It is run by another interpreter, and imports nothing of this project. It reads lines of JSON: the
first names the environment, {"environment": id, "arguments": {...}, "weights": {...}, "folder":
path}, and is answered by {"ready": true}. Each line after it has a number `n`, which its answer
has too:

    {"n": 1, "play": row, "base_url": url}     {"n": 1, "reward": 0.5}
    {"n": 2, "example": 7, "evaluation": false} {"n": 2, "row": {...}}, or null after the last
    {"n": 1, "cancel": true}                    {"n": 1, "refused": "it was cancelled"}

or by {"n": ..., "refused": reason}. Episodes are played side by side, on one loop. What the
environment prints goes to the job's log. The process ends when nobody asks it any more, and with it
its keeper ends what it has started (rewards/keeper.py).
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

MODEL = "policy"
NOWHERE = "http://127.0.0.1:9"
VERSIONS = "verifiers>=0.1.14,<0.4"
"""Which have `load_environment`, and clients that are told where the model is."""
SAYS_NOTHING = "EmptyModelResponseError"
"""What verifiers calls a turn without a word: it is the policy's fault, and scored as it is."""
_raised: ContextVar[list[str]] = ContextVar("_raised")
"""What reward functions of an episode raised: verifiers makes a reward of 0 of it."""


class Refusal(Exception):
    pass


def main() -> None:
    questions, answers = _private_pipes()
    asyncio.run(_serve(questions, answers))


async def _serve(questions: Any, answers: Any) -> None:
    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        player = Player(json.loads(questions.readline()))
    except Refusal as refusal:
        answer({"refused": str(refusal)})
        return
    answer({"ready": True})
    loop = asyncio.get_running_loop()
    tasks: dict[int, asyncio.Task[Mapping[str, Any]]] = {}

    async def answered(message: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await player.answer(message)
        except Refusal as refusal:
            return {"refused": str(refusal)}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also that it exits: an episode ends, not the process
            return {"refused": f"{type(error).__name__}: {error}"}

    def done(n: int, task: asyncio.Task[Mapping[str, Any]]) -> None:
        """Also where it was cancelled before it began."""
        del tasks[n]
        given = {"refused": "it was cancelled"} if task.cancelled() else task.result()
        answer({"n": n, **given})

    def ask(message: Mapping[str, Any]) -> None:
        n = message["n"]
        if "cancel" not in message:
            tasks[n] = loop.create_task(answered(message))
            tasks[n].add_done_callback(functools.partial(done, n))
        elif n in tasks:
            tasks[n].cancel()

    def listen() -> None:
        for line in questions:
            loop.call_soon_threadsafe(ask, json.loads(line))
        # Nobody waits for an answer any more. What else is left the keeper above it ends.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


class Player:
    """An environment that is loaded."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        # A module of the folder may be the environment; installed ones come first.
        sys.path.append(order["folder"])
        sys.dont_write_bytecode = True
        module = _module(order["environment"])
        self._vf = _verifiers()
        self._environment = _loaded(self._vf, order["environment"], module, order["arguments"])
        _weigh(self._environment.rubric, order["weights"])
        self._examples: dict[bool, Any] = {}

    async def answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "play" in message:
            return {"reward": await self._play(message["play"], message["base_url"])}
        return {"row": await self._row(message["example"], message["evaluation"])}

    async def _play(self, row: Mapping[str, Any], base_url: str) -> float:
        _raised.set([])
        client = self._vf.OpenAIChatCompletionsClient(_client(base_url))
        played = await self._environment.run_rollout(dict(row), client, MODEL, {})
        if raised := _raised.get():
            raise Refusal(f"a reward function failed: {raised[0]}")
        error = played.get("error")
        if error and not str(_of_error(error, "error")).startswith(SAYS_NOTHING):
            raise Refusal(_of_error(error, "error_chain_repr"))
        return float(played["reward"])

    async def _row(self, place: int, evaluation: bool) -> Mapping[str, Any] | None:
        """A row of the dataset, with the messages and the tools of its first request."""
        examples = self._dataset(evaluation)
        if place >= len(examples):
            return None
        example = dict(examples[place])
        try:
            json.dumps(example)
        except TypeError as error:
            raise Refusal(f"row {place} of its dataset is not JSON: {error}") from None
        client = self._vf.OpenAIChatCompletionsClient(_client(NOWHERE))
        state = await self._environment.init_state(example, client, MODEL)
        messages, _ = await client.to_native_prompt(state["prompt"])
        tools = await client.to_native_tools(state.get("tool_defs") or [])
        prompt = [_without_nulls(message) for message in messages]
        row = {"prompt": prompt, "answer": example.get("answer"), "tools": tools or []}
        return {name: value for name, value in row.items() if value} | {"example": example}

    def _dataset(self, evaluation: bool) -> Any:
        if evaluation not in self._examples:
            environment = self._environment
            read = environment.get_eval_dataset if evaluation else environment.get_dataset
            try:
                self._examples[evaluation] = read()
            except Exception as error:
                raise Refusal(f"its dataset cannot be read: {error}") from error
        return self._examples[evaluation]


def _verifiers() -> Any:
    try:
        vf = importlib.import_module("verifiers")
    except ImportError as error:
        raise Refusal(f"verifiers cannot be imported ({error}): pip install '{VERSIONS}'") from None
    for name in ("load_environment", "OpenAIChatCompletionsClient"):
        if not hasattr(vf, name):
            here = getattr(vf, "__version__", "")
            raise Refusal(f"verifiers {here} has no {name}: pip install '{VERSIONS}'")
    return vf


def _module(name: str) -> str:
    """Of an environment, as verifiers has it."""
    module = name.replace("-", "_").split("/")[-1]
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        raise Refusal(
            f"there is no environment {name!r}: it has no module {module}; pip install its package"
        )
    return module


def _loaded(vf: Any, name: str, module: str, arguments: Mapping[str, Any]) -> Any:
    try:
        load = importlib.import_module(module).load_environment
        known = inspect.signature(load).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [] if takes_any else sorted(set(arguments) - set(known))
        if unknown:
            raise Refusal(
                f"load_environment of {name!r} has no argument {unknown[0]!r}, only "
                f"{', '.join(known) or 'none'}"
            )
        environment = vf.load_environment(name, **arguments)
    except Refusal:
        raise
    except BaseException as error:
        raise Refusal(
            f"the environment {name!r} does not load: {type(error).__name__}: {error}"
        ) from error
    if getattr(environment.rubric, "has_group_rewards", False):
        raise Refusal(
            f"the rubric of {name!r} rewards the rollouts of a group together, and an episode is "
            "paid by itself: leave those functions out"
        )
    return environment


def _weigh(rubric: Any, weights: Mapping[str, float]) -> None:
    """Note what reward functions raise, and weigh them as the user says."""
    names = []
    for each in _rubrics(rubric):
        for place, function in enumerate(each.funcs):
            name = getattr(function, "__name__", repr(function))
            names.append(name)
            each.funcs[place] = _noted(name, function)
            if weights:
                each.weights[place] = weights.get(name, 0.0)
    if unknown := sorted(set(weights) - set(names)):
        raise Refusal(f"the rubric has no {unknown[0]!r}, only {', '.join(names)}")


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    of_environments = (each.rubric for each in getattr(rubric, "env_map", {}).values())
    for part in (*getattr(rubric, "rubrics", ()), *of_environments):
        yield from _rubrics(part)


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def noted(*arguments: Any, **named: Any) -> float:
        try:
            value = function(*arguments, **named)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _raised.get().append(f"{name}: {type(error).__name__}: {error}")
            raise

    return noted


def _client(base_url: str) -> Any:
    """Of all episodes' one pool, as openai_clients.py has it: making one takes 50 ms."""
    return _first_client().with_options(base_url=base_url)


@functools.cache
def _first_client() -> Any:
    """An answer takes as long as all others of its unit, and all may wait at the same time."""
    openai = importlib.import_module("openai")
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)
    http = openai.DefaultAsyncHttpxClient(
        limits=limits(max_connections=None, max_keepalive_connections=0)
    )
    waits = {"timeout": None, "max_retries": 0, "http_client": http}
    return openai.AsyncOpenAI(base_url=NOWHERE, api_key="none", **waits)


def _of_error(error: Any, name: str) -> str:
    return str(error.get(name) if isinstance(error, Mapping) else error)


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _private_pipes() -> tuple[Any, Any]:
    """Ours alone: the environment finds an empty input, and what it prints goes to the log."""
    questions = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


if __name__ == "__main__":
    # The modules beside this file are not meant.
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    main()
