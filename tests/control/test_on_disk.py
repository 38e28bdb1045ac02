"""What takes its name by a rename is on the disk before: no power cut leaves a name without bytes.

A rename may reach the disk before what was written. So each file that is renamed, alone or in a
folder, has to have been synced since it was last written.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.base import atomic
from pipelines.config.profiles import Resources
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.publish import publish
from pipelines.worker.worker import CODE, run_attempt
from stages import report
from stages.checkpoint import save_tensors
from stages.context import Context
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.engines.processes.parts import Pass, fill
from tests.control.made_up import SPEC, write_outputs
from tests.ledger_values import ORIGIN, launch, result


class Renames:
    """Every rename of this process, and the files that were renamed before they were synced."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.too_early: list[Path] = []
        self._synced: dict[tuple[int, int], int] = {}

    def sync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self._synced[stat.st_dev, stat.st_ino] = stat.st_size

    def renamed(self, target: Path) -> None:
        if target.name == "progress.json":
            return  # nothing depends on it
        self.targets.append(target.name)
        for file in [target] if target.is_file() else target.rglob("*"):
            stat = file.stat()
            if file.is_file() and self._synced.get((stat.st_dev, stat.st_ino)) != stat.st_size:
                self.too_early.append(file)


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renames]:
    """At its end no file was renamed too early."""
    seen = Renames()
    really_sync = os.fsync

    def sync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        really_sync(number)
        seen.sync(number)

    def watched(really: Any) -> Any:
        def rename(source: Any, target: Any) -> None:
            really(source, target)
            seen.renamed(Path(target))

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    yield seen
    assert seen.too_early == []


def test_a_file_of_the_ledger(tmp_path: Path, renames: Renames) -> None:
    atomic.write_json(tmp_path / "record.json", {"outs": {}})
    assert renames.targets == ["record.json"]


def test_a_checkpoint(tmp_path: Path, renames: Renames) -> None:
    save_tensors(tmp_path, 3, {"weight": torch.ones(2)}, {"history": []})
    assert renames.targets == ["checkpoint-00000003"]


def test_a_part(tmp_path: Path, renames: Renames) -> None:
    ctx = Context(stage="score", key=None, seed=1, folder=tmp_path)
    fill(ctx, Pass("rewards", 2, 2, lambda: lambda unit: list(unit)))
    assert "00000000-00000002.json" in renames.targets


def test_the_metrics_of_a_resumed_stage(tmp_path: Path, renames: Renames) -> None:
    Context(stage="sft", key=None, seed=1, folder=tmp_path).resume_at(1, [{"loss": 1.0}])
    assert renames.targets == ["metrics.jsonl"]


def test_the_outputs_of_a_stage(
    tmp_path: Path, ledger: Ledger, renames: Renames, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_config: Any, _inputs: Any, out: dict[str, Path], _ctx: Context) -> dict[str, float]:
        out["report"].mkdir()
        (out["report"] / "index.html").write_text("a page")
        return {"final_reward_mean": 1.0}

    monkeypatch.setattr(report, "run", run)
    bound = bind("report", Params())
    spec = replace(SPEC, stage="report", name="report", inputs={}, outs=bound.outs)
    spec = replace(spec, config=bound.config.values(None), metrics=bound.metrics)
    entry = ledger.find_or_create(spec, ORIGIN)
    attempt = entry.new_attempt(
        launch(root=tmp_path, code=CODE, resources=Resources(deterministic=False))
    )
    assert run_attempt(str(attempt.folder)) == "completed", attempt.result
    assert "out" in renames.targets


def test_outputs_that_are_copied_to_another_disk(
    tmp_path: Path, entry: Entry, other_disk: Path, renames: Renames
) -> None:
    attempt = entry.new_attempt(launch())
    write_outputs(entry)
    attempt.write(result(outs={}, metrics={}))
    for name in ("artifacts", "metrics"):
        (other_disk / name).mkdir()
        (tmp_path / name).symlink_to(other_disk / name)
    publish(tmp_path, entry)
    assert {"model", "sft.json"} <= set(renames.targets)


def test_two_threads_that_write_one_file_do_not_share_what_lies_beside_it(tmp_path: Path) -> None:
    both_are_there = threading.Barrier(2)

    def name(_: int) -> Path:
        both_are_there.wait()
        return atomic.unique(tmp_path / "heartbeat.json")

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(name, range(2)))) == 2
