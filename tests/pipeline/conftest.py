"""One tiny pipeline, run once by `dvc repro` in a session, and copies of it to try things in."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.repository import Repository
from pipelines.worker.session import sessions
from tests.waiting import until

_spec = importlib.util.spec_from_file_location("clones", Path(__file__).parents[1] / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
clones: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clones)


@pytest.fixture(scope="session", name="clones")
def _clones() -> Any:
    """How throwaway clones are made."""
    return clones


@pytest.fixture(scope="session")
def finished_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which `dvc repro` went through as users type it, committed. Read it only."""
    clone = clones.copy_tree(tmp_path_factory.mktemp("finished") / "clone")
    clone.set_params(**clones.TINY)
    clone.commit("tiny")
    with clone.session():
        repro = clone.start("dvc", "repro")
        output, _ = repro.communicate()
        assert repro.returncode == 0, output
        clone.run("lockstep", "sync")
        session = sessions(Repository(clone.root))[0]
        until(lambda: session.heartbeat.served == 9, "the session's last word")
    clone.commit("results")
    yield clone.root
    clone.kill_all()


@pytest.fixture
def finished(finished_root: Path, tmp_path: Path) -> Iterator[Any]:
    """A copy of the finished clone, cache and ledger included."""
    root = tmp_path / "clone"
    shutil.copytree(finished_root, root, symlinks=True)
    clone = clones.Clone(root)
    yield clone
    clone.kill_all()
