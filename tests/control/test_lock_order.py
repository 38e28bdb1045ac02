"""dvc.lock has one order, whichever stage ended first."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.dvc_repo.lock_order import order_lock

GRAPH = """
stages:
  last: {cmd: cat b c > d, deps: [b, c], outs: [d]}
  second: {cmd: cp a b, deps: [a], outs: [b]}
  third: {cmd: cp a c, deps: [a], outs: [c]}
"""


def dvc(root: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words, "-q"], cwd=root, check=True)


def clone(root: Path) -> Path:
    root.mkdir()
    dvc(root, "init", "--no-scm")
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "a").write_text("a")
    return root


@pytest.mark.slow
def test_stages_recorded_in_another_order_leave_the_bytes_of_a_plain_repro(tmp_path: Path) -> None:
    plain, other = clone(tmp_path / "plain"), clone(tmp_path / "other")
    dvc(plain, "repro")
    for name in ("third", "second", "last"):
        dvc(other, "repro", "--single-item", name)
    assert (other / "dvc.lock").read_bytes() != (plain / "dvc.lock").read_bytes()
    order_lock(other)
    assert (other / "dvc.lock").read_bytes() == (plain / "dvc.lock").read_bytes()


def test_a_stage_that_the_graph_no_longer_has_stays_at_the_end(tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    dvc(root, "repro")
    (root / "dvc.yaml").write_text(GRAPH.replace("  second:", "  renamed:"))
    before = set((root / "dvc.lock").read_text().splitlines())
    order_lock(root)
    lines = (root / "dvc.lock").read_text().splitlines()
    assert set(lines) == before
    names = [line.strip(" :") for line in lines if line.startswith("  ") and line[2] != " "]
    assert names == ["third", "last", "second"]


def test_no_lock_file_is_no_error(tmp_path: Path) -> None:
    order_lock(clone(tmp_path / "clone"))
