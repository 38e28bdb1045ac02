"""Two users in one clone: whose a file or a job is, is said, and nobody touches another's."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain, user_name
from pipelines.base.repository import Repository
from pipelines.commands.cli import main
from pipelines.ledger import entry as ledger
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.state import State
from pipelines.runs.cancel import cancel_stages
from tests.control.made_up import SPEC
from tests.ledger_values import ORIGIN, SLURM, launch

ME = user_name(os.getuid())
ANOTHER = os.getuid() + 12345


def refuse(*_: Any) -> None:
    """What the kernel says to who is not the owner, word for word; tests may run as root."""
    raise PermissionError(1, "Operation not permitted")


def test_a_stage_that_another_user_asked_for_is_named_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger.os, "utime", refuse)  # type: ignore[attr-defined]
    with pytest.raises(LockstepError, match=f"entry.json belongs to {ME}, and you are {ME}"):
        Ledger(tmp_path).find_or_create(SPEC, ORIGIN)


def test_what_is_not_permitted_is_named_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    error = PermissionError(13, "Permission denied", str(folder / "a" / "run.lock"))
    assert explain(error).endswith(f"; {folder} belongs to {ME}, and you are {ME}")
    assert explain(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"

    def found() -> None:
        raise error

    monkeypatch.setattr("pipelines.base.repository.Repository.find", found)
    assert main(["status"]) == 2
    assert f"{folder} belongs to {ME}" in capsys.readouterr().err


def test_another_users_job_is_neither_ended_nor_marked(
    repository: Repository, entry: Entry
) -> None:
    (repository.root / "params.yaml").write_text("seed: 17\n")
    attempt = entry.new_attempt(launch())
    attempt.write(launch(SLURM, user=ANOTHER, jobs=("7",), job="7", time=time.time()))
    for stages in ([SPEC.stage], []):
        with pytest.raises(LockstepError, match=f"these go on: sft, job 7 of {ANOTHER}"):
            cancel_stages(repository, stages, Console())
    assert not attempt.was_cancelled
    assert attempt.state() is State.QUEUED
