"""Strict reading of YAML that people write: errors name file, line, key and fix."""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.base.errors import LockstepError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]


def load_model(path: Path, model: type[Model]) -> Model:
    """Read `path` into `model`, or raise an error that says what to fix."""
    values = load_yaml(path)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = _all_keys(model)
        problems = [_describe(path, model, problem, known, values) for problem in error.errors()]
        raise LockstepError("\n".join(problems)) from None


def load_yaml(path: Path, *, pure: bool = True) -> dict[str, Any]:
    """The file as a mapping, by YAML 1.2 (so 1e-3 is a number), duplicate keys refused.

    The pure loader explains mistakes better; the other is faster, for files programs write.
    """
    try:
        values = deepcopy(_parsed(path.read_text(encoding="utf-8"), pure))
    except FileNotFoundError:
        raise LockstepError(f"{path}: no such file") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise LockstepError(f"{path}: not readable as YAML: {error}") from None
    except RecursionError:
        raise LockstepError(f"{path}: not readable as YAML: it is nested too deeply") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise LockstepError(f"{path}: expected `key: value` lines, found {type(values).__name__}")
    return values


@lru_cache(maxsize=16)
def _parsed(text: str, pure: bool) -> Any:
    """A stage's driver reads its params twice; the second time, only whether they have changed."""
    return YAML(typ="safe", pure=pure).load(text)


def _describe(
    path: Path,
    model: type[BaseModel],
    problem: Any,
    known: Sequence[str],
    values: Mapping[str, Any],
) -> str:
    location = _as_written(problem["loc"], values)
    key = ".".join(str(part) for part in location)
    where = _place(path, location)
    if problem["type"] == "extra_forbidden":
        siblings = _keys_at(model, [str(part) for part in problem["loc"][:-1]])
        return f"{where}: unknown key `{key}`{_nearest(location, siblings, known)}"
    if problem["type"] == "union_tag_not_found":
        tag = problem["ctx"]["discriminator"].strip("'")
        kinds = _tags(model, [str(part) for part in location], tag)
        return f"{where}: `{key}` has no `{tag}`; add one of {', '.join(kinds)}"
    if problem["type"] == "union_tag_invalid":
        tag, kind = problem["ctx"]["discriminator"].strip("'"), problem["ctx"]["tag"]
        kinds = _tags(model, [str(part) for part in location], tag)
        close = difflib.get_close_matches(str(kind), kinds, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return f"{where}: `{key}.{tag}` is '{kind}'; {hint}known: {', '.join(kinds)}"
    if problem["type"] == "missing":
        return f"{where}: key `{key}` is missing; add it"
    if problem["type"] == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{where}: `{key}`: {reason}" if key else f"{where}: {reason}"
    value = problem["input"]
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{where}: `{key}` is {value!r} ({type(value).__name__}): {reason}"


def _as_written(location: Location, values: Mapping[str, Any]) -> Location:
    """A location in the file: pydantic's also has the kind of a mapping, which is not a key."""
    node: Any = values
    written: list[int | str] = []
    for index, part in enumerate(location):
        if isinstance(node, dict) and part not in node and index < len(location) - 1:
            continue
        written.append(part)
        try:
            node = node[part]
        except (LookupError, TypeError):
            node = None
    return tuple(written)


def _nearest(location: Location, siblings: Sequence[str], known: Sequence[str]) -> str:
    """A hint: a similar key in the same section, else the same or a similar key elsewhere."""
    *parents, name = (str(part) for part in location)
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
    """The keys of a section; for a mapping with a kind, those of that kind."""
    return list(
        dict.fromkeys(key for each in _models_at(model, parents) for key in each.model_fields)
    )


def _tags(model: type[BaseModel], parents: Sequence[str], tag: str) -> list[str]:
    """The kinds that a mapping can have."""
    return [kind for each in _models_at(model, parents) for kind in _literals(each, tag)]


def _models_at(model: type[BaseModel], parents: Sequence[str]) -> list[type[BaseModel]]:
    current = [model]
    for part in parents:
        fields = [each.model_fields[part] for each in current if part in each.model_fields]
        if fields:
            current = _models_of(fields[0].annotation)
            continue
        # A name that the user chose, or the kind of the mapping.
        of_kind = [
            each
            for each in current
            if any(part in _literals(each, name) for name in each.model_fields)
        ]
        current = of_kind or current
    return current


def _literals(model: type[BaseModel], name: str) -> tuple[str, ...]:
    field = model.model_fields.get(name)
    if field is None or typing.get_origin(field.annotation) is not typing.Literal:
        return ()
    return typing.get_args(field.annotation)


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        inner = _models_of(field.annotation)
        # Of several kinds none applies before the user has chosen one.
        keys += _all_keys(inner[0], f"{prefix}{name}.") if len(inner) == 1 else [f"{prefix}{name}"]
    return keys


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation such as `Model`, `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (dict, typing.Union, types.UnionType, typing.Annotated):
        inner = typing.get_args(annotation)
        return [each_model for each in inner for each_model in _models_of(each)]
    return []


def place_of(path: Path, key: str) -> str:
    """The file and line of a dotted key, or of its longest prefix in the file."""
    return _place(path, tuple(key.split(".")))


def _place(path: Path, location: Location) -> str:
    """Loaded again with positions."""
    node = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    line = None
    for part in location:
        if not hasattr(node, "lc") or part not in node:
            break
        line = node.lc.key(part)[0] + 1
        node = node[part]
    return f"{path}:{line}" if line else str(path)
