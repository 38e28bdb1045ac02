"""The packages of the control plane import one another in one direction, and the docs say which."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "pipelines").rglob("*.py")
}
DRAWN = (ROOT / "docs/architecture.md").read_text().split("## The rooms of the control plane")[1]
ROOMS = re.findall(r"^\| `(\w+)` \|", DRAWN.split("\n## ")[0], re.MULTILINE)
"""From the lowest to the highest."""


def imports(name: str) -> set[str]:
    """The modules of this package that a module imports, late imports included."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {module if module in FILES else node.module for module in modules}
    return found & FILES.keys()


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_is_in_the_table_and_says_what_it_holds() -> None:
    packages = {path.parent.name: path for path in (ROOT / "pipelines").glob("*/__init__.py")}
    assert sorted(ROOMS) == sorted(packages)
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in packages.values())


def test_a_room_imports_only_those_below_it() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if name.count(".") > 1
        for other in imports(name)
        if ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    TopologicalSorter({name: imports(name) - {name} for name in FILES}).prepare()  # CycleError
