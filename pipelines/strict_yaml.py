"""YAML that people write, read strictly: errors name file, line, key and remedy."""

import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.errors import LockstepError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]


def load_model(path: Path, model: type[Model]) -> Model:
    """Read `path` into `model`, or raise an error that says what to mend."""
    values = load_yaml(path)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = _all_keys(model)
        problems = [_describe(path, model, problem, known) for problem in error.errors()]
        raise LockstepError("\n".join(problems)) from None


def load_yaml(path: Path, *, pure: bool = True) -> dict[str, Any]:
    """The file as a mapping, by YAML 1.2 (so 1e-3 is a number), duplicate keys refused.

    The pure loader explains mistakes better; the other is faster, for files programs write.
    """
    try:
        values = YAML(typ="safe", pure=pure).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockstepError(f"{path}: there is no such file") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise LockstepError(f"{path}: not readable as YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise LockstepError(f"{path}: expected `key: value` lines, found {type(values).__name__}")
    return values


def _describe(path: Path, model: type[BaseModel], problem: Any, known: Sequence[str]) -> str:
    location: Location = problem["loc"]
    key = ".".join(str(part) for part in location)
    line = _line_of(path, location)
    where = f"{path}:{line}" if line else str(path)
    if problem["type"] == "extra_forbidden":
        hint = _nearest(model, location, known)
        return f"{where}: unknown key `{key}`{hint}"
    if problem["type"] == "missing":
        return f"{where}: key `{key}` is missing; add it"
    if problem["type"] == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{where}: `{key}`: {reason}" if key else f"{where}: {reason}"
    found = problem["input"]
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{where}: `{key}` is {found!r} ({type(found).__name__}): {reason}"


def _nearest(model: type[BaseModel], location: Location, known: Sequence[str]) -> str:
    """A hint at what was meant: a close key beside it, else the same or a close key elsewhere."""
    *parents, name = (str(part) for part in location)
    siblings = _keys_at(model, parents)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{'.'.join([*parents, close[0]])}`?"
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"; did you mean `{elsewhere[0]}`?"
    close = difflib.get_close_matches(".".join([*parents, name]), known, n=1, cutoff=0)
    nearest = f"; the nearest known key is `{close[0]}`" if close else ""
    return f"{nearest} (keys here: {', '.join(siblings)})" if siblings else nearest


def _keys_at(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in parents:
        if current is None:
            return []
        field = current.model_fields.get(part)
        current = _model_of(field.annotation) if field else current
    return list(current.model_fields) if current else []


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Model`, `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (dict, typing.Union, types.UnionType):
        return next(filter(None, map(_model_of, typing.get_args(annotation))), None)
    return None


def _line_of(path: Path, location: Location) -> int | None:
    """The line of a key, found again with a loader that keeps positions."""
    node = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    line = None
    for part in location:
        if not hasattr(node, "lc") or part not in node:
            break
        line = node.lc.key(part)[0] + 1
        node = node[part]
    return line
