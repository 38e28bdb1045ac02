"""The family tree of policies: `sft` at the root, then preference runs and iterations."""

import re
from collections.abc import Mapping
from typing import Any

ROOT = "sft"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def refuse_odd_names(value: Any) -> Any:
    """A mapping whose keys are all words; ValueError names one that is not."""
    for name in value if isinstance(value, dict) else ():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name (a letter, then letters, digits and underscores), and "
                "DVC would silently drop it: call it iter_001, iter_002, ..."
            )
    return value


def family_tree(runs: Mapping[str, str], iterations: Mapping[str, str]) -> dict[str, str]:
    """Each policy and the one it starts from; ValueError says where that is no tree.

    `runs` and `iterations` give each policy's parent; iterations may start from runs.
    """
    if not runs and not iterations:
        raise ValueError(
            "rl.iterations is empty, and rl.preferences too: name at least one policy to learn, "
            "iter_001: {policy: sft}"
        )
    parents: dict[str, str] = {}
    for key, tree in (("rl.preferences", runs), ("rl.iterations", iterations)):
        for name, parent in tree.items():
            if name == ROOT:
                raise ValueError(f"{key}: 'sft' is the supervised policy; choose another name")
            if name in parents:
                raise ValueError(f"{key}: there is a policy called {name!r} already")
            if parent != ROOT and parent not in parents:
                raise ValueError(
                    f"{key}: {name} starts from {parent!r}, which is neither 'sft' nor a policy "
                    "above it"
                )
            parents[name] = parent
    return parents
