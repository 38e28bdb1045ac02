"""The code of a stage: the files of `stages/` that it imports, directly or not, each by its digest.

A digest leaves out comments and docstrings, so the map of file to digest changes when what the
stage does may have changed, and only then. DVC's stage `code` writes the maps to `code/`, where
each stage depends on that of its module; the md5 of the map is the version of the code that a job's
spec names. The `__init__` files of packages hold docstrings only and do not count. Files beside it
that a module reads, such as templates, it names in a constant `FILES`; they count by their bytes.

Parsing every file takes a second, so what is known of a file is remembered by its bytes.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.identity import syntax

CODE_STAGE = "code"
"""The stage of dvc.yaml that writes the maps."""
CODE_COMMAND = "python -m pipelines code"
CodeMap = Mapping[str, str]
"""Paths relative to the clone, sorted, with their digests."""
_REMEMBERED = "sources.json"


class Source(NamedTuple):
    """What is known of one file."""

    digest: str
    imports: list[str]
    """Modules of `stages`, and the names that are taken from them."""
    files: list[str]
    """Names of files beside it that it reads."""


_RULES = hashlib.sha256(b"".join(Path(it).read_bytes() for it in (__file__, syntax.__file__)))
_known: dict[str, Source] = {}
"""By the hash of a file's bytes."""


def map_path(module: str) -> str:
    """Where the map of a stage's module lies in the clone."""
    return f"{CODE_STAGE}/{module.rpartition('.')[2]}.json"


def map_text(code: CodeMap) -> str:
    """A map as the file that DVC hashes."""
    return json.dumps(code, indent=2, sort_keys=True) + "\n"


def version_of(code: CodeMap) -> str:
    """The md5 of a map, as dvc.lock has it."""
    return hashlib.md5(map_text(code).encode(), usedforsecurity=False).hexdigest()


def code_version(root: Path, module: str, home: Path | None = None) -> str:
    """The version of a stage's code in a clone or in a copy of it."""
    return version_of(code_map(root, module, home))


def code_map(root: Path, module: str, home: Path | None = None) -> dict[str, str]:
    """The files of `stages` that a module imports, itself among them, with the digest of each.

    `home`, the clone's folder of local state, has what an earlier command found out of the files.
    """
    if home is not None:
        _remember(home)
    return _closure(module, lambda path: _source(root / path))


def code_maps(root: Path, modules: Iterable[str], home: Path) -> dict[str, dict[str, str]]:
    """The maps of several modules, by where they lie; what was found out is remembered."""
    _remember(home)
    seen: dict[str, Path] = {}

    @cache
    def read(path: str) -> Source | None:
        return _source(root / path, seen)

    before = len(_known)
    maps = {map_path(module): _closure(module, read) for module in modules}
    if len(_known) > before:
        atomic.write_json(home / _REMEMBERED, {key: _known[key] for key in seen})
    return maps


def changed_files(old: CodeMap, new: CodeMap) -> dict[str, str]:
    """Each file that differs, and whether it was modified, deleted or is new."""
    return {
        path: "new" if path not in old else "deleted" if path not in new else "modified"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    }


def _closure(module: str, read: Callable[[str], Source | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    modules = [module]
    known = {module}
    for name in modules:
        path = f"{name.replace('.', '/')}.py"
        if (source := read(path)) is None:
            continue
        found[path] = source.digest
        new = [imported for imported in source.imports if imported not in known]
        known.update(new)
        modules += new
        for beside in (Path(path).with_name(file).as_posix() for file in source.files):
            if (read_too := read(beside)) is not None:
                found[beside] = read_too.digest
    return dict(sorted(found.items()))


def _source(path: Path, seen: dict[str, Path] | None = None) -> Source | None:
    """What is known of a file, noted in `seen` by its bytes; None where there is no such file."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if path.suffix != ".py":
        return Source(hashlib.md5(data, usedforsecurity=False).hexdigest(), [], [])
    key = _hash(data)
    if key not in _known:
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError) as error:
            raise LockstepError(f"{path}: Python cannot read it: {error}") from None
        _known[key] = Source(syntax.digest(tree), _imports(tree), _files(tree))
    if seen is not None:
        seen[key] = path
    return _known[key]


def _imports(tree: ast.Module) -> list[str]:
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import module` names a module; `from module import name` does not.
            names[node.module] = None
            names |= dict.fromkeys(f"{node.module}.{alias.name}" for alias in node.names)
    return [name for name in names if name.startswith("stages.")]


def _files(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FILES":
            return list(ast.literal_eval(node.value))
    return []


def _hash(data: bytes) -> str:
    """Under which a file is remembered; other rules for digests remember nothing of these."""
    hasher = _RULES.copy()
    hasher.update(data)
    return hasher.hexdigest()


def _remember(home: Path) -> None:
    """Take over what an earlier command has found out."""
    if not _known:
        stored = atomic.read_json(home / _REMEMBERED)
        for key, value in (stored if isinstance(stored, dict) else {}).items():
            if len(value) == len(Source._fields):
                _known[key] = Source(*value)
