"""Clones with an MLflow of their own, whose tables were made once for all tests."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

sys.path.insert(0, str(Path(__file__).parent))

from fake_clone import FakeClone

from pipelines.base import background
from pipelines.tracking import notify_send
from pipelines.tracking.rounds import SETTINGS
from tests.conftest import kill_each
from tests.shippers import forked_shippers
from tests.tracking.notify_tools import Hook
from tests.waiting import TIMEOUT_S, until


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: it takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    with forked_shippers():
        yield


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own tracking gets in, and nothing that a tracker sets gets out."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "LOCKSTEP_", "OPENLINEAGE_")):
            monkeypatch.delenv(name)
    for name in SETTINGS:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def make_clone(
    tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], FakeClone]]:
    clones: list[FakeClone] = []
    # MLflow puts artifacts of a store without a place for them under the current folder.
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> FakeClone:
        clone = FakeClone(tmp_path / name)
        clone.repository.home.mkdir()
        shutil.copy(migrated_database, clone.repository.home / "mlflow.db")
        clones.append(clone)
        return clone

    yield make
    for clone in clones:
        clone.close()
        left = clone.processes()
        kill_each(left)
        psutil.wait_procs(left)
        # One that was only about to start may still write there.
        until(partial(_removed, clone.root), f"{clone.root} goes")


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.fixture
def clone(make_clone: Callable[[str], FakeClone]) -> FakeClone:
    return make_clone("clone")


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


@pytest.fixture
def short_waits(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries; what is tried has as long as it takes."""
    monkeypatch.chdir(clone.root)
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    monkeypatch.setattr(background, "LINGER_S", 0.0)
    monkeypatch.setattr(background, "INTERVAL_S", 0.05)
    monkeypatch.setattr(background, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(notify_send, "TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(notify_send, "LONGEST_S", TIMEOUT_S)
