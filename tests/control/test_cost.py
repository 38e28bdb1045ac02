"""What the suite says of its own cost."""

from pathlib import Path
from types import SimpleNamespace

from tests.conftest import SLOW
from tests.cost import describe, limits, not_run, seconds_by_test

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_left_out_as_slow_is_there() -> None:
    assert [name for name in SLOW if not (ROOT / name).exists()] == []


def report(nodeid: str, duration: float) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, duration=duration)


def test_seconds_are_summed_over_set_up_test_and_clean_up_and_by_folder() -> None:
    reports = [report("tests/a/test_x.py::test_1", 2.0), report("tests/a/test_x.py::test_1", 3.0)]
    reports += [report("tests/a/test_y.py::test_2", 1.0), report("tests/b/test_z.py::test_3", 9.0)]
    lines = describe(seconds_by_test([*reports, SimpleNamespace()]), {"a": 5, "b": 6})
    assert lines[0].split() == ["9", "s", "of", "6", "s", "tests/b", "(1", "tests)"]
    assert lines[1].split() == ["6", "s", "of", "5", "s", "tests/a", "(2", "tests)"]
    assert [line.split()[-1] for line in lines[3:]] == [
        "tests/b/test_z.py::test_3",
        "tests/a/test_x.py::test_1",
        "tests/a/test_y.py::test_2",
    ]


def test_a_folder_that_has_grown_by_half_is_named() -> None:
    grown, _, _ = describe({"tests/a/test_x.py::test_1": 9.1}, {"a": 6})
    assert grown.endswith("GROWN BY HALF")
    fine, _, _ = describe({"tests/a/test_x.py::test_1": 8.9}, {"a": 6})
    assert "GROWN" not in fine


def test_what_was_not_run_is_counted_by_reason() -> None:
    skipped = [SimpleNamespace(longrepr=("file", 3, f"Skipped: {why}")) for why in "xyx"]
    assert not_run(skipped) == ["       2 not run here: x", "       1 not run here: y"]


def test_every_folder_has_a_limit_and_every_limit_a_folder() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert limits((ROOT / "CONTRIBUTING.md").read_text()).keys() == folders
