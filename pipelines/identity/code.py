"""The code version of a stage: the files of `stages/` that it imports, directly or not.

dvc.yaml lists the same files as dependencies, so DVC reruns a stage when its code changes and only
then.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path


def code_files(root: Path, module: str) -> list[str]:
    """The import closure of `module` inside its own package, as sorted paths relative to `root`."""
    package = module.split(".", 1)[0]
    found: set[str] = set()
    queue = [module]
    while queue:
        path = _file_of(root, queue.pop())
        if path is None or path in found:
            continue
        found.add(path)
        queue += _imports((root / path).read_bytes(), package)
    return sorted(found)


def code_version(root: Path, module: str) -> str:
    """One hash over the files of the closure and their names."""
    digest = hashlib.sha256()
    for path in code_files(root, module):
        digest.update(f"{path}\n".encode())
        digest.update(hashlib.sha256((root / path).read_bytes()).digest())
    return digest.hexdigest()


@cache
def _imports(source: bytes, package: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import module` names a module; `from module import name` does not.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name == package or name.startswith(f"{package}.")]


def _file_of(root: Path, module: str) -> str | None:
    """The file behind a module; package `__init__` files hold docstrings only and do not count."""
    path = Path(*module.split(".")).with_suffix(".py")
    return path.as_posix() if (root / path).is_file() else None
