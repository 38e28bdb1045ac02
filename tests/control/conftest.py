"""The ledger of a clone that runs nothing, with one stage in it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry, Ledger
from tests.control.made_up import SPEC
from tests.ledger_values import ORIGIN


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def ledger(repository: Repository) -> Ledger:
    return Ledger(repository.jobs)


@pytest.fixture
def entry(ledger: Ledger) -> Entry:
    return ledger.find_or_create(SPEC, ORIGIN)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
