"""Which server serves whom: never one that imported other code, or under other settings."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SWITCH = "LOCKSTEP_WARM"

_FAMILIES = (
    "DVC_",
    "GIT_",
    "LOCKSTEP_",
    "MLFLOW_",
    "OPENLINEAGE_",
    "PREFECT_",
    "SSH_",
    "SUBMITIT_",
    "TMUX",
)
_SINGLE = (
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "LINES",
    "OLDPWD",
    "PATH",
    "PS1",
    "PWD",
    "PYTEST_CURRENT_TEST",
    "SHLVL",
    "TERM",
    "_",
)
"""Variables that no library reads while it is imported. Each child is given its own."""


class Kind(StrEnum):
    """What a server has imported."""

    CONTROL = "control"
    """DVC and the driver of a stage."""
    COMPUTE = "compute"
    """What stages compute with."""


def is_switched_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user wants a fresh process for everything."""
    return environment.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def _spaces() -> list[str]:
    """The containers of this process: in others, the same path may be another file."""
    try:
        return [str(Path(f"/proc/self/ns/{name}").readlink()) for name in _SPACES]
    except OSError:
        return []


_SPACES = ("mnt", "net", "pid", "user")


@dataclass(frozen=True)
class Identity:
    """All that a server's imports may depend on, and what its children see."""

    kind: Kind
    python: tuple[str, ...]
    code: Path
    """The copy of our own packages that it has imported."""
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """Equal for those who may share a server; tells nothing about the variables' values."""
        settings = {
            name: value
            for name, value in self.environment.items()
            if not name.startswith(_FAMILIES) and name not in _SINGLE
        }
        words = [*self.python, str(self.code), json.dumps(settings, sort_keys=True), *_spaces()]
        return f"{self.kind}-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]}"
