"""Presets: named sets of params, merged into params.yaml on request.

`presets/NAME.yaml` holds a description and a part of params.yaml, and so does
`recipes/NAME/params.yaml`, beside the data and the model that go with it. Keys and types are
checked like those of params.yaml; whether values are consistent is checked on the merged params,
which are written only when they are valid. Where a preset names an algorithm, settings that only
other algorithms read are reset to their defaults. Comments and order of params.yaml are kept.
"""

import difflib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter

from pipelines.base.atomic import write_text
from pipelines.base.errors import LockstepError
from pipelines.config.params import PARAMS_FILE, load_params
from pipelines.config.strict_yaml import load_model, load_yaml
from stages.contracts.base import Section
from stages.contracts.params import Params
from stages.contracts.refusals import READ_BY
from stages.contracts.rl import Algorithm

FOLDER = "presets"
RECIPES = "recipes"


@dataclass(frozen=True)
class Preset:
    """Values for some keys of params.yaml."""

    name: str
    file: str
    """Its path, relative to the repository."""
    description: str
    params: dict[str, Any]
    """As in params.yaml, but only the keys it sets."""

    def settings(self) -> Iterator[tuple[str, ...]]:
        """The keys it sets, each as its path."""
        for name, value in self.params.items():
            if isinstance(value, dict):
                yield from ((name, key) for key in value)
            else:
                yield (name,)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "params": self.params}


@dataclass(frozen=True)
class Change:
    """A key of params.yaml that gets another value."""

    key: str
    old: Any
    new: Any

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "old": self.old, "new": self.new}


@dataclass(frozen=True)
class Merged:
    """params.yaml with presets merged into it."""

    text: str
    changes: list[Change]


def preset_files(root: Path) -> dict[str, Path]:
    """Each preset's file by its name, those of recipes last."""
    presets = {path.stem: path for path in (root / FOLDER).glob("*.yaml")}
    recipes = {path.parent.name: path for path in (root / RECIPES).glob("*/params.yaml")}
    return dict(sorted(presets.items()) + sorted(recipes.items()))


def load_presets(root: Path, names: Sequence[str] | None = None) -> list[Preset]:
    """The presets of these names, in their order; all where none are given."""
    known = preset_files(root)
    for name in names or ():
        if name not in known:
            raise LockstepError(_unknown(name, list(known)))
    return [_load(root, name, known[name]) for name in names or known]


def merge(root: Path, presets: Sequence[Preset]) -> Merged:
    """params.yaml with the presets in it, later over earlier; LockstepError if that is invalid."""
    path = root / PARAMS_FILE
    before = load_yaml(path)
    document = _round_trip().load(path.read_text(encoding="utf-8"))
    if document is None:
        document = CommentedMap()
    keys: dict[tuple[str, ...], None] = {}
    for preset in presets:
        for key, value in assignments(preset):
            _set(path, document, key, value)
            keys[key] = None
    text = _dumped(document)
    after = YAML(typ="safe").load(text)
    _check(root, after, presets)
    # A key that the file omits has the default, which may equal the preset's value.
    full = Params().model_dump(mode="json")
    compared = [
        Change(".".join(key), _value(before, key, _value(full, key)), _value(after, key))
        for key in keys
    ]
    changes = [change for change in compared if change.old != change.new]
    return Merged(text if changes else path.read_text(encoding="utf-8"), changes)


def assignments(preset: Preset) -> list[tuple[tuple[str, ...], Any]]:
    """The values to set, key by key: resets of other algorithms' settings, then the preset's."""
    values = [(key, _value(preset.params, key)) for key in preset.settings()]
    return [*_resets(preset), *values]


def _resets(preset: Preset) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Settings that the preset's algorithm does not read, at their defaults.

    Another algorithm's settings would be refused beside it.
    """
    algorithm = _value(preset.params, ("rl", "algorithm"))
    if algorithm is None:
        return
    full = Params().model_dump(mode="json")
    for name, readers in READ_BY.items():
        if algorithm not in readers:
            yield ("policy_update", name), full["policy_update"][name]
    if algorithm != Algorithm.REMAX:
        yield ("rollout", "greedy_baseline"), full["rollout"]["greedy_baseline"]


def write(root: Path, merged: Merged) -> None:
    """Write params.yaml, atomically."""
    write_text(root / PARAMS_FILE, merged.text)


def render_list(presets: Sequence[Preset]) -> str:
    if not presets:
        return f"no presets: there is no {FOLDER}/NAME.yaml"
    width = max(len(preset.name) for preset in presets)
    lines = [f"{preset.name:<{width}}  {preset.description}" for preset in presets]
    return "\n".join([*lines, "`lockstep preset NAME` merges one into params.yaml"])


def render_changes(changes: Sequence[Change]) -> str:
    width = max((len(change.key) for change in changes), default=0)
    return "\n".join(
        f"{change.key:<{width}}  {_shown(change.old)} -> {_shown(change.new)}" for change in changes
    )


def _keys_and_types_only(values: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Refuse unknown keys and wrong types, not values that disagree with the defaults."""
    try:
        return handler(values)
    except ValidationError as error:
        if any(problem["type"] != "value_error" for problem in error.errors()):
            raise
        return Params()


class _PresetFile(Section):
    """presets/NAME.yaml or recipes/NAME/params.yaml."""

    description: str
    """One line, for the list of presets."""
    params: Annotated[Params, WrapValidator(_keys_and_types_only)]
    """A part of params.yaml."""


def _load(root: Path, name: str, path: Path) -> Preset:
    description = load_model(path, _PresetFile).description
    # Values keep their notation in the file: 1.0e-6, not 1e-06.
    params = _round_trip().load(path.read_text(encoding="utf-8"))["params"]
    return Preset(name, path.relative_to(root).as_posix(), description, params)


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    listed = ", ".join(known) if known else f"none, {FOLDER}/ is empty"
    return f"unknown preset '{name}'{hint} (known: {listed})"


def _check(root: Path, values: dict[str, Any], presets: Sequence[Preset]) -> None:
    try:
        Params.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        if any(problem["type"] != "value_error" for problem in problems):
            # Presets have been checked for this, so the error is in params.yaml: report its line.
            load_params(root)
        files = " and ".join(preset.file for preset in presets)
        reasons = [_reason(problem) for problem in problems]
        raise LockstepError(
            "\n".join(
                [f"{files}: {PARAMS_FILE} would be invalid with it, and is not changed", *reasons]
            )
        ) from None


def _reason(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    reason = str(problem["ctx"]["error"])
    return f"  `{key}`: {reason}" if key else f"  {reason}"


def _value(params: dict[str, Any], key: tuple[str, ...], default: Any = None) -> Any:
    current: Any = params
    for part in key:
        if not isinstance(current, dict) or part not in current:
            return default
        current = current[part]
    return current


def _set(path: Path, document: CommentedMap, key: tuple[str, ...], value: Any) -> None:
    *sections, name = key
    current = document
    for section in sections:
        current = current.setdefault(section, CommentedMap())
        if not isinstance(current, CommentedMap):
            raise LockstepError(f"{path}: `{section}` must be a section of `key: value` lines")
    if name not in current:
        # Before the last key: an empty line after that one belongs to the next section.
        current.insert(max(0, len(current) - 1), name, value)
    elif current[name] != value:
        current[name] = value


class _Representer(RoundTripRepresenter):
    """Writes `null` by its name. A class of its own: representers belong to classes, and with that
    of all others DVC would write other bytes in this process."""


_Representer.add_representer(
    type(None),
    lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"),
)


def _round_trip() -> YAML:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


def _dumped(document: CommentedMap) -> str:
    stream = io.StringIO()
    _round_trip().dump(document, stream)
    return stream.getvalue()


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
