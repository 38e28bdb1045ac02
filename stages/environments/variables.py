"""Environment variables in texts: `${NAME}` stands for a value that no file and no error shows."""

import os
import re
from collections.abc import Iterable

from stages.environments.environment import NoAnswer

SHORTEST = 6
"""Characters of what may be a secret: a number that a variable has is in many texts."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def value_of(name: str) -> str:
    """NoAnswer where the variable is not set."""
    if name not in os.environ:
        raise NoAnswer(f"the environment variable {name} is not set: export it before the run")
    return os.environ[name]


def filled(text: str) -> str:
    """A text with the values of its variables."""
    return _VARIABLE.sub(lambda match: value_of(match[1]), text)


def redacted(text: str, written: Iterable[str], names: Iterable[str] = ()) -> str:
    """A text without the values of these variables, nor of those in what is written."""
    inside = [name for each in written for name in _VARIABLE.findall(each)]
    values = {name: os.environ.get(name, "") for name in {*names, *inside}}
    # One value may be the beginning of another.
    for name in sorted(values, key=lambda name: (-len(values[name]), name)):
        if len(values[name]) >= SHORTEST:
            text = text.replace(values[name], f"${{{name}}}")
    return text
