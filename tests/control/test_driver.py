"""What a driver publishes is what the workspace asks for at that moment."""

from pathlib import Path

import pytest

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind
from pipelines.driver.driver import Driver
from pipelines.driver.executors import make_executor
from pipelines.ledger.entry import Entry
from pipelines.ledger.invocation import current_invocation
from pipelines.tracking.health import Health
from tests.control.made_up import SPEC, write_outputs
from tests.ledger_values import launch, result


@pytest.fixture
def entry(entry: Entry) -> Entry:
    """A stage whose job has ended well, with nobody waiting for it."""
    attempt = entry.new_attempt(launch(ExecutorKind.DEBUG))
    write_outputs(entry)
    attempt.write(result(outs={}, metrics={}))
    return entry


def driver(entry: Entry, root: Path, identity: str) -> Driver:
    repository = Repository(root)
    return Driver(
        repository=repository,
        entry=entry,
        executors=lambda kind: make_executor(kind, repository),
        launch=launch(ExecutorKind.DEBUG),
        invocation=current_invocation(),
        console=Console(),
        identity=lambda: identity,
        health=Health(root),
    )


@pytest.fixture(autouse=True)
def _nothing_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")


def test_outputs_of_what_is_still_asked_for_are_published(entry: Entry, tmp_path: Path) -> None:
    driver(entry, tmp_path, SPEC.fingerprint).run()
    assert (tmp_path / "artifacts/model/weights").read_text() == "w"


def test_outputs_of_what_changed_meanwhile_are_kept_and_not_published(
    entry: Entry, tmp_path: Path
) -> None:
    """DVC would record them as made from what the workspace has now."""
    with pytest.raises(LockstepError, match="changed while its job ran"):
        driver(entry, tmp_path, "another").run()
    assert not (tmp_path / "artifacts").exists()
    assert (entry.out / "model/weights").read_text() == "w"
