"""What is read from the ledger is what was written; whatever else lies there is named and kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.processes import this_process
from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.mailbox import Post
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import State, TaskState
from pipelines.worker.session import Heartbeat
from tests.ledger_values import ORIGIN, launch, record, result, task_report, worker

FULL = launch(
    ExecutorKind.SLURM,
    invocation=ORIGIN.invocation,
    submitter=this_process(),
    resources=Resources(gpus_per_node=2, extra={"hint": "nomultithread"}, setup=["module load x"]),
    shards=(0, 3),
    graph=({"stage": "sft", "deps": [], "outs": {"a": None}},),
    session=Path("/a/session"),
)
VALUES = [
    FULL,
    launch(),
    worker(environment={"cpu": "A", "packages": {"torch": "2"}}),
    result(outs={"artifacts/model": "m.dir"}, metrics={"loss": 0.1, "steps": 3}),
    result("failed", error="e", retryable=True),
    task_report(State.FAILED, error="e"),
    task_report(TaskState.LOST_A_RANK),
    SchedulerView(token="t", jobs={"7_0": SlurmJob("7_0", "RUNNING", used=1.5)}, ended_since=2.0),
    ORIGIN,
    record(earlier_environments=({"cpu": "B"},)),
    Post(Path("/an/attempt"), Path("/code"), 1.0),
    Heartbeat(1.0, resident=("sft",)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "launch.json"


def change(path: Path, **changes: Any) -> str:
    """Write the file as somebody else might have; what it holds then."""
    files.write(path, FULL)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path.read_text()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_read_is_what_was_written(path: Path, value: Any) -> None:
    files.write(path, value)
    assert files.read(type(value), path) == value
    assert json.loads(path.read_text())["version"] == value.VERSION


def test_numbers_of_a_record_keep_their_kind(path: Path) -> None:
    files.write(path, record(metrics={"steps": 3, "loss": 3.0}))
    assert '"steps": 3\n' in path.read_text()
    assert '"loss": 3.0,' in path.read_text()


@pytest.mark.parametrize("version", [2, None, "1"])
def test_a_file_of_another_version_is_named_and_kept(path: Path, version: Any) -> None:
    written = change(path, version=version)
    with pytest.raises(LockstepError, match=f"{path} has version {version}, .* reads version 1"):
        files.read(Launch, path)
    assert path.read_text() == written


@pytest.mark.parametrize("text", ["", '{"version": 1, "prof', "[]", "null", "\x00"])
def test_a_torn_or_foreign_file_is_named_and_kept(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(LockstepError, match=f"{path} is no .*: it was damaged"):
        files.read(Launch, path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"surprise": 1}, "surprise"), ({"invocation": {"id": "i", "command": "c", "x": 1}}, "x")],
)
def test_a_key_that_is_not_known_is_named(path: Path, changes: dict[str, Any], key: str) -> None:
    change(path, **changes)
    with pytest.raises(LockstepError, match=f"{path} has key `.*{key}`.*does not know"):
        files.read(Launch, path)


def test_a_value_of_another_kind_is_named_with_its_key(path: Path) -> None:
    change(path, resources={"nodes": 0})
    with pytest.raises(LockstepError, match=r"no Launch: `resources.nodes`"):
        files.read(Launch, path)


def test_what_must_be_there_and_is_not_is_named(path: Path) -> None:
    assert files.read(Launch, path) is None
    attempt = Attempt(path.parent)
    assert attempt.launch is None
    with pytest.raises(LockstepError, match=f"{path} is missing"):
        _ = attempt.launched
    attempt.write(replace(FULL, shards=None))
    assert attempt.launched.shards is None


def test_a_file_that_went_away_is_caught_like_any_other(path: Path) -> None:
    """The shipper reads a ledger that people remove meanwhile."""
    with pytest.raises(FileNotFoundError, match="is missing"):
        files.load(Launch, path)
