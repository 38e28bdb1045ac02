"""Every stage of dvc.yaml with its paths filled in, read in a time that grows with their number.

DVC's index makes an object for each path of each stage, which takes long for a few hundred
iterations. Here DVC fills in the templates and no more. Whatever a stage may have that is not
looked after here raises Unsupported: such a graph is DVC's own index to read.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIST_FILES = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
_KNOWN_KEYS = {"cmd", "deps", "params", "outs", "metrics", "desc", "meta"}
_KNOWN_OUT_KEYS = {"cache", "persist", "desc", "type", "labels", "meta", "push"}
_PARAM_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_IGNORED_NAME = re.compile(r"(\*\.)?[\w.-]+/?")


class Unsupported(Exception):
    """Something that only DVC itself knows how to read."""


@dataclass(frozen=True)
class Out:
    path: str
    in_cache: bool
    persist: bool


@dataclass(frozen=True)
class Definition:
    """One stage as dvc.yaml has it."""

    address: str
    cmd: str | list[str]
    deps: tuple[str, ...]
    params: tuple[str, ...]
    """Keys of params.yaml."""
    outs: tuple[Out, ...]


def read_definitions(repo: Any, params: Mapping[str, Any] | None = None) -> dict[str, Definition]:
    """Every stage by address, in the order of the file; Unsupported where only DVC can read it.

    `params`: values to fill in instead of those of params.yaml.
    """
    from dvc.exceptions import DvcException
    from dvc.parsing import DataResolver
    from dvc.parsing.context import ContextError
    from dvc.schema import COMPILED_MULTI_STAGE_SCHEMA
    from dvc.utils.serialize import load_yaml
    from voluptuous import Invalid

    root = Path(repo.root_dir)
    _check_files_of_dvc(root)
    try:
        data = COMPILED_MULTI_STAGE_SCHEMA(load_yaml(str(root / "dvc.yaml")))
        resolver = DataResolver(repo, str(root), data)
        if params is not None:
            _replace_params(resolver, data, params)
        names = resolver.get_keys()
        filled = {name: resolver.resolve_one(name)[name] for name in names}
    except (DvcException, ContextError, Invalid) as error:
        raise Unsupported(str(error)) from None
    if "datasets" in data:
        raise Unsupported("dvc.yaml has datasets")
    definitions = {name: _definition(name, body) for name, body in filled.items()}
    paths = {path for one in definitions.values() for path in one.deps}
    for path in paths.union(out.path for one in definitions.values() for out in one.outs):
        _check_path(root, path)
    return definitions


def _replace_params(resolver: Any, data: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Templates are filled in from the resolver's context, when a stage is resolved."""
    from dvc.parsing.context import Context

    if "vars" in data:
        raise Unsupported("dvc.yaml has vars")
    resolver.context.data.clear()
    resolver.context.merge_update(Context(params))


def ignored_names(root: Path) -> frozenset[str]:
    """What .dvcignore leaves out of folders; Unsupported where it has other patterns."""
    ignored = {".git", ".hg", ".dvc"}
    path = root / ".dvcignore"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if not line.strip() or line.startswith("#"):
            continue
        if not _IGNORED_NAME.fullmatch(line):
            raise Unsupported(f".dvcignore has a pattern: {line}")
        ignored.add(line.removesuffix("/"))
    return frozenset(ignored)


def _check_files_of_dvc(root: Path) -> None:
    """DVC also reads .dvc files, and the dvc.yaml and .dvcignore of folders."""
    listed = subprocess.run(
        [*_LIST_FILES, "--", "*.dvc", "*dvc.yaml", "*.dvcignore"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    names = {name for name in listed.stdout.decode(errors="replace").split("\0") if name}
    if listed.returncode or names - {"dvc.yaml", ".dvcignore"}:
        raise Unsupported("there are more files of DVC's than dvc.yaml")


def _definition(name: str, body: dict[str, Any]) -> Definition:
    unknown = body.keys() - _KNOWN_KEYS
    if unknown:
        raise Unsupported(f"stage {name} has {', '.join(sorted(unknown))}")
    deps = body.get("deps", ())
    outs = [*_outs(name, body.get("outs", ())), *_outs(name, body.get("metrics", ()))]
    if not deps and not outs:
        raise Unsupported(f"stage {name} has neither deps nor outs")
    return Definition(
        address=name,
        cmd=body["cmd"],
        deps=tuple(deps),
        params=tuple(map(_param_key, body.get("params", ()))),
        outs=tuple(outs),
    )


def _outs(name: str, items: Any) -> list[Out]:
    outs = []
    for item in items:
        path, options = next(iter(item.items())) if isinstance(item, dict) else (item, {})
        if (isinstance(item, dict) and len(item) != 1) or options.keys() - _KNOWN_OUT_KEYS:
            raise Unsupported(f"stage {name} has an output with more than a path")
        outs.append(Out(path, options.get("cache", True), options.get("persist", False)))
    return outs


def _check_path(root: Path, path: Any) -> None:
    """A path below the root, or one that lies elsewhere and is written out."""
    if not isinstance(path, str) or "://" in path or os.path.normpath(path) != path:
        raise Unsupported(f"path {path!r}")
    if path == ".." or path.startswith("../") or Path(path).is_relative_to(root):
        raise Unsupported(f"path {path!r}")


def _param_key(key: Any) -> str:
    if not isinstance(key, str) or not _PARAM_KEY.fullmatch(key):
        raise Unsupported(f"params {key!r}")
    return key
