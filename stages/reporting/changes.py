"""The params that differ from the defaults, as dotted keys."""

from dataclasses import dataclass
from typing import Any

from stages.contracts.params import Params

ABSENT = "not there"


@dataclass(frozen=True)
class Change:
    key: str
    default: str
    value: str


def from_defaults(params: Params) -> list[Change]:
    """What a reader must put into params.yaml, beside nothing, to get this run."""
    default = _flatten(Params().model_dump(mode="json"))
    value = _flatten(params.model_dump(mode="json"))
    return [
        Change(key, default.get(key, ABSENT), value.get(key, ABSENT))
        for key in [*value, *(key for key in default if key not in value)]
        if default.get(key) != value.get(key)
    ]


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = str(value).lower() if isinstance(value, bool) else str(value)
    return leaves
