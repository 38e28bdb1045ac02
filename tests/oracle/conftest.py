"""Where the comparisons are written down; `benchmarks/numerics.py` collects them."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.oracle.harness import Difference

Record = Callable[[str, str, Difference], None]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.oracle)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainers report their use; the variable against that is only read at import."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Note a comparison: its family, the setting, how far apart the two are."""

    def note(family: str, setting: str, apart: Difference) -> None:
        record_property("numerics", {"family": family, "setting": setting, **asdict(apart)})

    return note


@pytest.fixture
def equal(record: Record) -> Record:
    """Note a comparison, whose sides must be equal."""

    def note(family: str, setting: str, apart: Difference) -> None:
        record(family, setting, apart)
        apart.check()

    return note
