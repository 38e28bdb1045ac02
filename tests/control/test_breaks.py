"""The list of deliberate breaks fits the code, and the tool tells which of them is caught."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


break_list = _load("break_list")
tool = _load("breaks")
BREAKS = break_list.load(ROOT / break_list.LIST)


def test_the_list_fits_the_code() -> None:
    assert break_list.problems(ROOT, BREAKS) == []


def test_there_are_many_breaks_and_some_of_every_package() -> None:
    assert len(BREAKS) >= 80
    broken = {Path(each.file).parent.as_posix() for each in BREAKS}
    code = set(break_list.packages(ROOT, "pipelines", "stages"))
    # A package may hold nothing but other packages.
    holds_code = {folder for folder in code if _has_code(ROOT / folder)}
    assert holds_code - broken == set()


def _has_code(folder: Path) -> bool:
    return any(path.name != "__init__.py" for path in folder.glob("*.py"))


SUMS = """\
def add(a, b):
    return a + b


def name():
    return 'x'
"""
TEST = """\
import subprocess, sys


def test_add():
    program = [sys.executable, "-c", "import sums; print(sums.add(2, 1))"]
    assert subprocess.check_output(program, cwd="/") == b"3\\n"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program with one test, in files that git would track."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "project"
    root.mkdir()
    (root / "sums.py").write_text(SUMS)
    (root / "test_sums.py").write_text(TEST)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def a_break(**changes: object) -> Any:
    values: dict[str, object] = {
        "name": "minus",
        "file": "sums.py",
        "find": "a + b",
        "replace": "a - b",
        "why": "sums are differences",
        "caught_by": ("test_sums.py::test_add",),
    }
    return break_list.Break(**{**values, **changes})


def test_a_break_is_caught_by_a_test_that_fails_and_the_tree_stays_as_it_is(project: Path) -> None:
    before = {path: path.read_bytes() for path in project.glob("*.py")}
    unseen = a_break(name="unseen", find="'x'", replace="'y'")
    results = tool.run_all([a_break(), unseen], project, jobs=2)
    assert results["minus"].outcome is tool.Outcome.CAUGHT, "the test's own process has the break"
    assert results["minus"].by == "test_sums.py::test_add"
    assert results["unseen"].outcome is tool.Outcome.NOT_CAUGHT
    assert {path: path.read_bytes() for path in project.glob("*.py")} == before


@pytest.mark.parametrize(
    ("code", "said", "may_hang", "outcome"),
    [
        (0, "2 passed in 1s", False, "NOT CAUGHT"),
        (0, "1 passed, 2 skipped in 1s", False, "NOT CAUGHT"),
        (0, "2 skipped in 1s", False, "broken test selection"),
        (1, "FAILED a.py::test_b - x", False, "caught"),
        (2, "errors during collection", False, "broken test selection"),
        (4, "no such file", True, "broken test selection"),
        (5, "no tests ran", False, "broken test selection"),
        (None, "", False, "NOT CAUGHT"),
        (None, "", True, "caught"),
    ],
)
def test_only_a_test_that_ran_and_failed_catches(
    code: int | None, said: str, may_hang: bool, outcome: str
) -> None:
    assert tool.judge(code, said, may_hang=may_hang)[0] == outcome


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"find": "a * b"}, "minus: its text is 0 times in sums.py"),
        ({"find": "return"}, "minus: its text is 2 times in sums.py"),
        ({"file": "gone.py"}, "minus: there is no file gone.py"),
        ({"replace": "a + b"}, "minus: it changes nothing"),
        ({"caught_by": ("test_sums.py::test_other",)}, "there is no test test_sums.py::test_other"),
        ({"caught_by": ()}, "minus: it names no test"),
    ],
)
def test_a_mistake_in_the_list_is_named(
    project: Path, changes: dict[str, object], complaint: str
) -> None:
    assert any(
        complaint in problem for problem in break_list.problems(project, [a_break(**changes)])
    )


def test_results_are_recorded_as_they_come(tmp_path: Path, project: Path) -> None:
    path = tmp_path / "results/breaks.json"
    for name, outcome in (("b", tool.Outcome.CAUGHT), ("a", tool.Outcome.NOT_CAUGHT)):
        tool.record(path, project, name, tool.Result(outcome, None, 1.26))
    recorded = json.loads(path.read_text())
    assert list(recorded["breaks"]) == ["a", "b"]
    assert recorded["breaks"]["b"] == {"caught": True, "by": None, "seconds": 1.3}
    assert {"commit", "hardware", "versions"} <= recorded.keys()
