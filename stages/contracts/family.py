"""The family tree of policies: `sft` at the root, then preference runs, iterations, online ones."""

import re
from collections.abc import Mapping
from typing import Any

ROOT = "sft"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_NAME = 100
"""Files are named after it, with more around it, and file systems take 255."""


def refuse_odd_names(value: Any, such_as: str = "iter_001, iter_002, ...") -> Any:
    """A mapping whose keys are all words, and short ones; ValueError names one that is not."""
    for name in value if isinstance(value, dict) else ():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name (a letter, then letters, digits and underscores), and "
                f"DVC would silently drop it: call it {such_as}"
            )
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"{name[:20]}... has {len(name)} characters, and files are named after it: use at "
                f"most {LONGEST_NAME}"
            )
    return value


def family_tree(
    runs: Mapping[str, str], iterations: Mapping[str, str], online: Mapping[str, str]
) -> dict[str, str]:
    """Each policy and the one it starts from, parents first; ValueError says where it is no tree.

    Each mapping gives its policies' parents. Iterations and online policies may start from runs,
    and from one another.
    """
    if not runs and not iterations and not online:
        raise ValueError(
            "rl.iterations is empty, and rl.preferences and rl.online too: name at least one "
            "policy to learn, iter_001: {policy: sft}"
        )
    trees = {"rl.preferences": runs, "rl.iterations": iterations, "rl.online": online}
    _refuse_doubles(trees)
    parents: dict[str, str] = {}
    _add(parents, {"rl.preferences": runs})
    _add(parents, {"rl.iterations": iterations, "rl.online": online})
    return parents


def _refuse_doubles(trees: Mapping[str, Mapping[str, str]]) -> None:
    names: set[str] = set()
    for key, tree in trees.items():
        for name in tree:
            if name == ROOT:
                raise ValueError(f"{key}: 'sft' is the supervised policy; choose another name")
            if name in names:
                raise ValueError(f"{key}: there is a policy called {name!r} already")
            names.add(name)


def _add(parents: dict[str, str], trees: Mapping[str, Mapping[str, str]]) -> None:
    """Each tree in its own order, waiting for the others where it starts from one of theirs."""
    left = {key: list(tree.items()) for key, tree in trees.items()}
    while any(left.values()):
        before = len(parents)
        for rows in left.values():
            while rows and (rows[0][1] == ROOT or rows[0][1] in parents):
                name, parent = rows.pop(0)
                parents[name] = parent
        if len(parents) == before:
            key = next(key for key, rows in left.items() if rows)
            name, parent = left[key][0]
            raise ValueError(
                f"{key}: {name} starts from {parent!r}, which is neither 'sft' nor a policy above "
                "it"
            )
