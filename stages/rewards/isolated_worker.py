"""The process that scores rows: it reads lines of JSON and answers each with one.

The first line says by what: {"rule": params, "folder": path, "seconds": of CPU} for a built-in
rule, {"function": "module:function", "folder": path, "columns": names or null} for a function. Each
line after it has rows, and is answered by {"rewards": numbers} or by {"refused": reason, "index":
of the row}. A keeper above it ends all that it has started with it. It ends with its parent, and
never writes where it was not told to.
"""

import asyncio
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from stages.rewards.keeper import keep

RULE_MEMORY = 8 << 30
"""Bytes of address space for a rule: a response may be a number that no memory holds."""
LOOK_INTERVAL_S = 1.0
Score = Callable[[Sequence[Mapping[str, Any]]], list[float]]
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A message to what is answered to it."""


class Refusal(Exception):
    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index


def main() -> None:
    serve(_open_score)


def serve(opened: Callable[[Mapping[str, Any]], Answer]) -> None:
    """Answer line by line, by what is opened for the first one."""
    keep()
    questions, answers = _private_pipes()
    asked = os.getpid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    by: Answer | None = None
    for line in questions:
        message = json.loads(line)
        try:
            if by is None:
                by = opened(message)
                answer: Mapping[str, Any] = {"ready": True}
            else:
                answer = by(message)
        except Refusal as refusal:
            answer = {"refused": str(refusal), "index": refusal.index}
        if os.getpid() != asked:
            # A fork of the code came back, too: a second answer would be the next question's.
            os._exit(1)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _open_score(order: Mapping[str, Any]) -> Answer:
    score = _by_rule(order) if "rule" in order else _by_function(order)
    return lambda message: {"rewards": score(message["rows"])}


def _private_pipes() -> tuple[Any, Any]:
    """Ours alone: the scored code finds an empty input, and what it prints goes to the log."""
    questions = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_INTERVAL_S)
    os._exit(1)


def _by_rule(order: Mapping[str, Any]) -> Score:
    from stages.rewards.given import Unusable
    from stages.rewards.rules import open_rule

    resource.setrlimit(resource.RLIMIT_AS, (RULE_MEMORY, RULE_MEMORY))
    try:
        rule, seconds = open_rule(order["rule"], Path(order["folder"])), float(order["seconds"])
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None

    def score(rows: Sequence[Mapping[str, Any]]) -> list[float]:
        rewards = []
        for index, row in enumerate(rows):
            # Of CPU time, so that a busy machine does not change a reward. The signal ends the
            # process wherever it is.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                rewards.append(rule(row))
            except Unusable as reason:
                raise Refusal(str(reason), index) from None
            except Exception as error:
                raise Refusal(f"the rule failed: {_last_line(error)}", index) from error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        return rewards

    return score


def _by_function(order: Mapping[str, Any]) -> Score:
    function = _load(Path(order["folder"]), order["function"])
    by_position, by_name = _columns_of(function, order["columns"])
    # One loop for all batches: a client or a semaphore that the module keeps belongs to it.
    loop = asyncio.Runner()

    def score(rows: Sequence[Mapping[str, Any]]) -> list[float]:
        from stages.rewards.given import columns

        in_order = columns(rows, by_position).values()
        try:
            returned = function(*in_order, **columns(rows, by_name))
            if inspect.isawaitable(returned):
                returned = loop.run(_awaited(returned))
            return _numbers(returned, len(rows))
        except Refusal:
            raise
        except BaseException as error:
            # SystemExit, too: it is the function that ends, not the scoring.
            raise Refusal(f"raised {_last_line(error)}") from error

    return score


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _load(folder: Path, name: str) -> Callable[..., Any]:
    """The function, from a file in the folder and from nowhere else."""
    module_name, _, function_name = name.partition(":")
    path = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not path.is_file():
        raise Refusal(f"there is no file {path}: score.folder names the folder of functions")
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        raise Refusal(f"importing {path} raised {_last_line(error)}") from error
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise Refusal(f"{module_name} is a module of Python's or of a package: rename {path}")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise Refusal(f"{path} has no function {function_name}")
    checked: Callable[..., Any] = function
    return checked


def _columns_of(
    function: Callable[..., Any], names: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The columns that the function's parameters name, by position alone and by name; all of them,
    where it takes any. Without names, it is not asked about rows.
    """
    if names is None:
        return [], []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise Refusal(
            f"its parameters have no names ({error}): write a function in Python"
        ) from None
    named = [parameter for parameter in parameters if parameter.name in names]
    by_position = [each.name for each in named if each.kind is each.POSITIONAL_ONLY]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return by_position, [name for name in names if name not in by_position]
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.name not in names
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    if unknown:
        raise Refusal(
            f"it asks for {', '.join(unknown)}, which no row has; there are {', '.join(names)}"
        )
    return by_position, [each.name for each in named if each.name not in by_position]


def _numbers(returned: Any, count: int) -> list[float]:
    """What a function returned, as one finite value per row."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    # A set has as many numbers, and not in the order of the rows.
    unordered = str | bytes | Mapping | Set
    if isinstance(values, unordered) or not hasattr(values, "__len__"):
        raise Refusal(f"returned {_shown(returned)}, not a list of {count} numbers")
    if len(values) != count:
        raise Refusal(f"returned {len(values)} numbers for {count} responses")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float:
    # np.bool_ and tensors of one number are no numbers by themselves.
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real):
        raise Refusal(f"returned {_shown(value)}, not a number", index)
    try:
        number = float(plain)
    except OverflowError:
        raise Refusal(f"returned {_shown(value)}, which no float can hold", index) from None
    if not math.isfinite(number):
        raise Refusal(f"returned {number}", index)
    return number


def _shown(value: Any) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})"


def _last_line(error: BaseException) -> str:
    """The error, with the line that raised it; the whole traceback is in the log."""
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return traceback.format_exception_only(error)[-1].strip() + where


if __name__ == "__main__":
    main()
