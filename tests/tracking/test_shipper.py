"""The shipper as a process: started in no time, alone, gone by itself, and no bother to anybody."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fake_clone import FakeClone

from pipelines.shipper import start_shipper, unshipped
from pipelines.tracking import ship_all

SOURCE = Path(__file__).parents[2]


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_it_is_started_in_no_time_and_ends_by_itself(clone: FakeClone) -> None:
    entry = clone.run("sft")
    began = time.monotonic()
    start_shipper(clone.repository)
    assert time.monotonic() - began < 0.5
    until(lambda: not unshipped(clone.repository))
    assert clone.run_of("sft").info.run_id == clone.cursor(entry)["run_id"]
    until(lambda: not clone.shippers())


def test_live_jobs_are_shipped_while_they_run(clone: FakeClone) -> None:
    entry = clone.entry("sft")
    clone.start(entry, steps=2)
    start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("step") == 2)
    clone.log(entry, range(3, 6))
    until(lambda: clone.cursor(entry).get("step") == 5)
    assert clone.run_of("sft").info.status == "RUNNING"
    clone.finish(entry)
    until(lambda: clone.cursor(entry).get("done", False))
    assert clone.run_of("sft").info.status == "FINISHED"


def test_of_many_started_at_once_one_stays(clone: FakeClone) -> None:
    entry = clone.entry("sft")
    clone.start(entry, steps=1)
    for _ in range(4):
        start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("state") == "running")
    # The others find the lock taken and leave, once they have started at all.
    until(lambda: len(clone.shippers()) == 1)
    start_shipper(clone.repository)
    until(lambda: len(clone.shippers()) == 1)
    assert len(clone.runs()) == 2


def test_mlflow_is_imported_only_when_there_is_something_to_ship(clone: FakeClone) -> None:
    script = (
        "import sys, pipelines.shipper as shipper, pipelines.tracking\n"
        "from pipelines.repository import Repository\n"
        "shipper.LINGER_S = 0.1\n"
        f"shipper.run_shipper(Repository(__import__('pathlib').Path({str(clone.root)!r})), 0.3)\n"
        "assert 'mlflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=SOURCE, check=True)


def test_it_makes_its_own_database(clone: FakeClone) -> None:
    (clone.repository.home / "mlflow.db").unlink()
    clone.run("sft")
    assert ship_all(clone.repository) == []
    assert clone.run_of("sft").info.status == "FINISHED"
    assert sorted(path.name for path in clone.repository.home.glob("*mlflow*")) == ["mlflow.db"]


def test_it_goes_with_the_clone_and_leaves_nothing_running(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone.repository.home.rename(clone.root.parent / "elsewhere")
    elsewhere = clone.root.parent / "elsewhere" / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}")
    entry = clone.entry("sft")
    clone.start(entry, steps=1)
    start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("state") == "running")
    shutil.rmtree(clone.repository.home)
    until(lambda: not clone.shippers())
    assert not clone.repository.home.exists()
    assert {run.info.status for run in clone.runs()} == {"KILLED"}


def test_it_can_be_switched_off(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    clone.run("sft")
    start_shipper(clone.repository)
    assert clone.shippers() == []


def test_it_takes_little_from_the_training(clone: FakeClone) -> None:
    clone.start(clone.entry("sft"))
    start_shipper(clone.repository)
    until(lambda: any(process.nice() == 10 for process in clone.shippers()))
    [shipper] = clone.shippers()
    assert shipper.parent() == psutil.Process() or shipper.ppid() == 1
