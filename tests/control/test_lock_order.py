"""dvc.lock has one order, whichever stage ended first."""

from contextlib import chdir
from pathlib import Path

import pytest
from dvc.repo import Repo

from pipelines.dvc_repo.lock_order import order_lock

GRAPH = """
stages:
  last: {cmd: cat b c > d, deps: [b, c], outs: [d]}
  second: {cmd: cp a b, deps: [a], outs: [b]}
  third: {cmd: cp a c, deps: [a], outs: [c]}
"""


def repro(root: Path, stage: str | None = None) -> None:
    """All of it, or one stage alone."""
    with chdir(root), Repo(str(root)) as repo:
        repo.reproduce(stage, single_item=stage is not None)


def clone(root: Path) -> Path:
    root.mkdir()
    Repo.init(str(root), no_scm=True).close()
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "a").write_text("a")
    return root


@pytest.mark.slow
def test_stages_recorded_in_another_order_leave_the_bytes_of_a_plain_repro(tmp_path: Path) -> None:
    plain, other = clone(tmp_path / "plain"), clone(tmp_path / "other")
    repro(plain)
    for name in ("third", "second", "last"):
        repro(other, name)
    assert (other / "dvc.lock").read_bytes() != (plain / "dvc.lock").read_bytes()
    order_lock(other)
    assert (other / "dvc.lock").read_bytes() == (plain / "dvc.lock").read_bytes()


def test_a_stage_that_the_graph_no_longer_has_stays_at_the_end(tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    repro(root)
    (root / "dvc.yaml").write_text(GRAPH.replace("  second:", "  renamed:"))
    before = set((root / "dvc.lock").read_text().splitlines())
    order_lock(root)
    lines = (root / "dvc.lock").read_text().splitlines()
    assert set(lines) == before
    names = [line.strip(" :") for line in lines if line.startswith("  ") and line[2] != " "]
    assert names == ["third", "last", "second"]


def test_no_lock_file_is_no_error(tmp_path: Path) -> None:
    order_lock(clone(tmp_path / "clone"))
