"""docs/params.md and docs/profiles.md, made from the docstrings under the fields.

Run `python -m pipelines.config.reference` after changing a field; a test keeps the files in step.
"""

import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic._internal._docs_extraction import extract_docstrings_from_cls
from pydantic.fields import FieldInfo

from pipelines.config.profiles import Profile, Resources
from stages.contracts.catalog import STAGES
from stages.contracts.params import Params

_HEADER = (
    "<!-- Made by `python -m pipelines.config.reference` from the docstrings of the fields. -->\n"
)


def params_reference() -> str:
    """The page about params.yaml."""
    readers = _readers()
    parts = [
        "# params.yaml",
        _HEADER,
        "Everything that bears identity. A changed value reruns exactly the stages that read it; "
        "unknown keys and wrong types are refused. Where and on what stages run is not here but in "
        "[profiles](profiles.md).\n",
        "The last column says which stages read the key.\n",
    ]
    plain = {k: v for k, v in Params.model_fields.items() if _section(v) is None}
    parts += ["## Top level\n", _table(Params, plain, readers)]
    for name, field in Params.model_fields.items():
        section = _section(field)
        if section is not None:
            parts += [f"## {name}\n", f"{descriptions(Params)[name]}\n"]
            parts.append(_table(section, section.model_fields, readers, f"{name}."))
    parts += _kinds(readers)
    return "\n".join(parts)


def _kinds(readers: typing.Callable[[str], str]) -> list[str]:
    """A table for each kind of source that `rewards` can name."""
    union = typing.get_args(typing.get_args(Params.model_fields["rewards"].annotation)[1])[0]
    parts = [
        "## rewards\n",
        f"{descriptions(Params)['rewards']} Read by {readers('rewards')}; each by the "
        "reward_source of its name, too.\n",
    ]
    for kind in typing.get_args(union):
        name = typing.get_args(kind.model_fields["kind"].annotation)[0]
        parts += [f"### kind: {name}\n", f"{kind.__doc__}\n"]
        fields = {key: field for key, field in kind.model_fields.items() if key != "kind"}
        own = {key: field for key, field in fields.items() if key in kind.__annotations__}
        parts.append(_table(kind, own | fields))
    return parts


def profiles_reference() -> str:
    """The page about slurm_profiles/."""
    nested = {k: v for k, v in Profile.model_fields.items() if k not in ("defaults", "stages")}
    return "\n".join(
        [
            "# slurm_profiles/NAME.yaml",
            _HEADER,
            "Where and on what stages run. Nothing here is identity: changing it reruns nothing. "
            "Chosen by `--profile NAME` or the variable LOCKSTEP_PROFILE; else `local`.\n",
            "## Top level\n",
            _table(Profile, nested),
            "## defaults, and stages.NAME\n",
            "`defaults` holds what every stage gets; `stages.sft`, say, what sft gets instead. "
            "In parentheses: the `#SBATCH` flag that the field becomes.\n",
            _table(Resources, Resources.model_fields),
        ]
    )


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """What is written under each field.

    Pydantic would attach it to the fields themselves (`use_attribute_docstrings`), but parses the
    source of every class for that, each time that a command starts.
    """
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each.__module__.startswith(("pipelines.", "stages.")):
            found |= extract_docstrings_from_cls(each, use_inspect=True)
    return found


def _table(
    model: type[BaseModel], fields: dict[str, FieldInfo], readers: Any = None, within: str = ""
) -> str:
    texts = descriptions(model)
    head = ["key", "type", "default", "meaning"] + (["read by"] if readers else [])
    rows = [head, ["---"] * len(head)]
    for name, field in fields.items():
        row = [f"`{name}`", _type(field.annotation), _default(field), texts.get(name, "")]
        rows.append(row + ([readers(within + name)] if readers else []))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _readers() -> typing.Callable[[str], str]:
    """Which stages read a key: those that track it, or a section around it."""

    def readers(key: str) -> str:
        found = [
            name
            for name, stage in STAGES.items()
            if any(key == own or key.startswith(f"{own}.") for own in stage.config.param_keys())
        ]
        return ", ".join(found)

    return readers


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _type(annotation: Any) -> str:
    return " or ".join(_names(annotation))


def _names(annotation: Any) -> Iterator[str]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for inner in typing.get_args(annotation):
            yield from _names(inner)
    elif origin is typing.Annotated:
        yield from _names(annotation.__origin__)
    elif origin is typing.Literal:
        yield from (f"`{value}`" for value in typing.get_args(annotation))
    elif origin is not None:
        yield {dict: "mapping", list: "list"}[origin]
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (f"`{member.value}`" for member in annotation)
    else:
        plain = {str: "text", int: "integer", float: "number", bool: "true or false"}
        yield plain.get(annotation, "nothing")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, dict) and value:
        return ", ".join(f"`{name}`" for name in value)
    if isinstance(value, Enum):
        value = value.value
    if value is None or value in ("", [], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def write(folder: Path) -> None:
    (folder / "params.md").write_text(params_reference(), encoding="utf-8")
    (folder / "profiles.md").write_text(profiles_reference(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "docs")
