"""From the job that hashed its outputs to DVC: a hash is handed on, or the bytes are read again."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from pipelines.base.repository import Repository
from pipelines.dvc_repo import handover
from pipelines.identity.hashing import HashCache
from pipelines.ledger import out_hashes
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.publish import place_outputs, publish
from pipelines.worker.worker import _compute
from stages.context import Context
from stages.signature import Known, signature_of
from tests.control.made_up import write_outputs
from tests.control.test_hashing import CHANGES
from tests.control.test_worker import REPORT
from tests.ledger_values import ORIGIN, launch

NOT_SO = "0" * 32
"""Where this comes out, nobody has read the file."""
SIZE = 3 << 20


@pytest.fixture
def done(entry: Entry) -> Entry:
    """A stage whose outputs are complete, with one hash that shows who believes it."""
    write_outputs(entry)
    known = HashCache().signed(entry.out)
    weights = entry.out / "model/weights"
    out_hashes.write(entry.out, {**known, weights: Known(known[weights].signature, NOT_SO)})
    return entry


@pytest.fixture
def project(repository: Repository) -> Repository:
    """A DVC project with a large file in it, and its database inside."""
    root = repository.root
    repo = Repo.init(str(root), no_scm=True)
    with repo.config.edit() as settings:
        settings["core"]["site_cache_dir"] = str(root / "database")
    repo.close()
    (root / "weights").write_bytes(b"one" * SIZE)
    return repository


def known_of(project: Repository) -> dict[Path, Known]:
    path = project.root / "weights"
    signature = signature_of(path)
    assert signature is not None
    return {path: Known(signature, NOT_SO)}


def seen_by_dvc(project: Repository) -> str:
    """The hash with which DVC would record the file."""
    from dvc_data.hashfile.hash import hash_file

    with Repo(str(project.root)) as repo:
        _, found = hash_file(str(project.root / "weights"), repo.fs, "md5", repo.state)
    return str(found.value)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def dvc_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a driver that was forked from DVC."""
    monkeypatch.setenv(handover.DVC_TAKES_THEM, "1")


def test_a_job_keeps_the_hash_of_each_file_and_reads_none_that_its_stage_speaks_of(
    ledger: Ledger, tmp_path: Path
) -> None:
    entry = ledger.find_or_create(REPORT, ORIGIN)

    def run(_config: Any, _inputs: Any, out: dict[str, Path], ctx: Context) -> dict[str, float]:
        out["model"].mkdir()
        for name in ("said", "read"):
            (out["model"] / name).write_text(name)
        ctx.wrote(out["model"] / "said", NOT_SO)
        return {}

    context = Context(stage="report", key=None, seed=1, folder=entry.folder)
    outs, _ = _compute(run, entry.new_attempt(launch(root=tmp_path)), context, {}, "00000")
    kept = {path.name: each.md5 for path, each in out_hashes.read(entry.out).items()}
    assert kept["said"] == NOT_SO
    assert kept["read"] == md5(entry.out / "model/read")
    assert outs["artifacts/model"] != HashCache().of(entry.out / "model")


def test_a_published_file_keeps_the_hash_that_its_job_gave_it(done: Entry, tmp_path: Path) -> None:
    record = publish(tmp_path, done)
    weights = tmp_path / "artifacts/model/weights"
    assert HashCache(tmp_path / ".lockstep/hashes.json").of(weights) == NOT_SO
    # What a worker that was killed did not report is made up from the same.
    assert record.outs["artifacts/model"] != HashCache().of(weights.parent)
    assert place_outputs(done, tmp_path, done.folder / "publishing")[weights].md5 == NOT_SO


@pytest.mark.parametrize("change", CHANGES)
def test_of_an_output_that_was_touched_after_its_job_no_hash_is_handed_on(
    done: Entry, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    time.sleep(0.02)
    change(done.out / "model/weights")
    record = publish(tmp_path, done)
    weights = tmp_path / "artifacts/model/weights"
    assert HashCache(tmp_path / ".lockstep/hashes.json").of(weights) == md5(weights)
    assert record.outs["artifacts/model"] == HashCache().of(weights.parent)


def test_of_a_copy_on_another_disk_no_hash_is_handed_on(
    done: Entry, tmp_path: Path, other_disk: Path
) -> None:
    (tmp_path / "artifacts").symlink_to(other_disk)
    placed = place_outputs(done, tmp_path, done.folder / "publishing")
    assert list(placed) == [tmp_path / "metrics/sft.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model/weights": [1]}', '{"model/weights": 1}'])
def test_hashes_that_are_not_as_they_were_written_cost_no_outputs(
    done: Entry, tmp_path: Path, text: str
) -> None:
    (done.out / "hashes").write_text(text)
    record = publish(tmp_path, done)
    assert record.outs["artifacts/model"] == HashCache().of(tmp_path / "artifacts/model")


@pytest.mark.usefixtures("dvc_takes_them")
def test_dvc_reads_no_file_whose_hash_it_was_handed(project: Repository) -> None:
    handover.leave(project, "sft", known_of(project))
    assert seen_by_dvc(project) == md5(project.root / "weights"), "not before it was taken"
    os.utime(project.root / "weights")
    handover.leave(project, "sft", known_of(project))
    handover.take(project, "sft")
    assert seen_by_dvc(project) == NOT_SO
    assert not list((project.home / "handover").iterdir())


@pytest.mark.usefixtures("dvc_takes_them")
@pytest.mark.parametrize("change", CHANGES)
def test_dvc_reads_what_was_changed_since_it_was_hashed(
    project: Repository, change: Callable[[Path], None]
) -> None:
    handover.leave(project, "sft", known_of(project))
    time.sleep(0.02)
    change(project.root / "weights")
    handover.take(project, "sft")
    assert seen_by_dvc(project) == md5(project.root / "weights")


@pytest.mark.usefixtures("dvc_takes_them")
@pytest.mark.parametrize("text", [None, "{", '{"weights": []}'])
def test_a_handover_that_was_torn_is_none(project: Repository, text: str | None) -> None:
    if text is not None:
        handover.leave(project, "sft", known_of(project))
        (project.home / "handover/sft.json").write_text(text)
    handover.take(project, "sft")
    assert seen_by_dvc(project) == md5(project.root / "weights")


@pytest.mark.usefixtures("dvc_takes_them")
def test_where_dvc_cannot_be_told_it_reads(
    project: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.root / "database").write_text("a file in the way")
    handover.leave(project, "sft", known_of(project))
    handover.take(project, "sft")
    assert "sft: DVC hashes its outputs again: " in capsys.readouterr().err
    (project.root / "database").unlink()
    assert seen_by_dvc(project) == md5(project.root / "weights")


@pytest.mark.usefixtures("dvc_takes_them")
def test_what_cannot_be_left_for_dvc_is_read_by_it(project: Repository) -> None:
    project.home.mkdir()
    (project.home / "handover").write_text("a file in the way")
    handover.leave(project, "sft", known_of(project))
    assert seen_by_dvc(project) == md5(project.root / "weights")


def test_dvc_is_not_imported_for_little(
    project: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    handover.leave(project, "sft", known_of(project))
    assert seen_by_dvc(project) == md5(project.root / "weights")
    os.utime(project.root / "weights")
    monkeypatch.setattr(handover, "_WORTH_AN_IMPORT", SIZE)
    handover.leave(project, "sft", known_of(project))
    assert seen_by_dvc(project) == NOT_SO
