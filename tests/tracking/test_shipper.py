"""The shipper as a process: started in no time, alone, gone by itself, and no bother to anybody."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_clone import FakeClone

from pipelines.base import atomic, background
from pipelines.base.locks import hold_lock
from pipelines.tracking import rounds as tracking
from pipelines.tracking.cursor import Scanner, unshipped
from pipelines.tracking.rounds import ship_all
from pipelines.tracking.shipper import problem, shipper_process, start_shipper
from tests.waiting import TIMEOUT_S, until

SOURCE = Path(__file__).parents[2]
START_PROCESS = background.start_process


@pytest.fixture
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shipper is a fresh interpreter."""
    monkeypatch.setattr(background, "start_process", START_PROCESS)


def test_it_is_started_in_no_time_makes_its_own_database_and_ends_by_itself(
    clone: FakeClone,
) -> None:
    (clone.repository.home / "mlflow.db").unlink()
    entry = clone.run("sft")
    program = (
        "import sys; from pathlib import Path\n"
        "from pipelines.base.repository import Repository\n"
        "from pipelines.tracking.shipper import start_shipper\n"
        f"start_shipper(Repository(Path({str(clone.root)!r})))\n"
        "sys.exit('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0, "who starts it need not import what it needs"
    until(lambda: not unshipped(clone.repository), "all is shipped")
    assert clone.run_of("sft").info.run_id == clone.cursor(entry)["run_id"]
    assert clone.run_of("sft").info.status == "FINISHED"
    psutil.wait_procs(clone.shippers(), TIMEOUT_S)
    assert clone.shippers() == []
    assert sorted(path.name for path in clone.repository.home.glob("*mlflow*")) == ["mlflow.db"]


def test_live_jobs_are_shipped_while_they_run(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=2)
    start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("step") == 2, "two steps")
    clone.log(entry, range(3, 6))
    until(lambda: clone.cursor(entry).get("step") == 5, "five steps")
    assert clone.run_of("sft").info.status == "RUNNING"
    clone.finish(entry)
    until(lambda: clone.cursor(entry).get("done", False), "the job's end")
    assert clone.run_of("sft").info.status == "FINISHED"


def test_of_many_started_at_once_one_stays(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=1)
    for _ in range(4):
        start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("state") == "running", "a run in MLflow")
    # The others find the lock taken and leave, once they have started at all.
    until(lambda: len(clone.shippers()) == 1, "one shipper")
    start_shipper(clone.repository)
    until(lambda: len(clone.shippers()) == 1, "one shipper")
    assert len(clone.runs()) == 2


def test_a_command_waits_until_a_shipper_takes_back_what_was_in_the_way(clone: FakeClone) -> None:
    """This process plays a shipper at its last word: the real moment is too short to hit."""
    shipper = shipper_process(clone.repository)
    shipper.note_problem("MLflow does not answer")
    with hold_lock(clone.repository.home / "shipper.lock"):
        last_word = threading.Timer(1.0, shipper.note_problem, (None,))
        last_word.start()
        assert ship_all(clone.repository) == []
        assert problem(clone.repository) is None
        last_word.join()


def test_a_command_waits_for_as_long_as_a_shipper_is_at_work(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process plays a shipper that is slower than the time that a shipper has to come."""
    monkeypatch.setattr(background, "START_TIMEOUT_S", 1.0)
    clone.run("sft")
    with hold_lock(clone.repository.home / "shipper.lock"):
        slow = threading.Timer(3.0, clone.sync)
        slow.start()
        assert ship_all(clone.repository) == []
        slow.join()


def test_a_command_does_not_wait_for_a_shipper_that_never_comes(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tracking, "start_shipper", lambda _: None)
    entry = clone.run("sft")
    assert ship_all(clone.repository) == [entry]


def test_one_that_pauses_makes_room_at_once(clone: FakeClone) -> None:
    """As a shipper does whose MLflow does not answer."""
    process = replace(shipper_process(clone.repository), address="http://127.0.0.1:9")
    pause = threading.Thread(target=process.pause, args=(10 * TIMEOUT_S,), daemon=True)
    pause.start()
    atomic.write_json(clone.repository.home / "shipper.json", {"address": "http://127.0.0.1:10"})
    pause.join(TIMEOUT_S)
    assert not pause.is_alive()


def test_a_command_is_not_stopped_by_what_is_in_the_way_of_another_mlflow(clone: FakeClone) -> None:
    """This process plays a shipper that was started for another address a moment before."""
    clone.run("sft")
    other = replace(shipper_process(clone.repository), address="http://127.0.0.1:9")
    last_word = threading.Timer(0.2, other.note_problem, ("MLflow does not answer",))
    last_word.start()
    assert ship_all(clone.repository, TIMEOUT_S) == []
    assert clone.run_of("sft").info.status == "FINISHED"
    last_word.join()


def test_mlflow_is_imported_only_when_there_is_something_to_ship(clone: FakeClone) -> None:
    script = (
        "import sys, pipelines.export.shipping as shipper\n"
        "from pipelines.base import background\n"
        "from pipelines.base.repository import Repository\n"
        "background.LINGER_S = 0.1\n"
        f"shipper.run_shipper(Repository(__import__('pathlib').Path({str(clone.root)!r})), 0.3)\n"
        "assert 'mlflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=SOURCE, check=True)


def test_it_goes_with_the_clone_and_leaves_nothing_running(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone.repository.home.rename(clone.root.parent / "elsewhere")
    elsewhere = clone.root.parent / "elsewhere" / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}")
    entry = clone.begin("sft", steps=1)
    start_shipper(clone.repository)
    until(lambda: clone.cursor(entry).get("state") == "running", "a run in MLflow")
    # At once: the shipper may write while a folder is deleted file by file.
    clone.repository.home.rename(clone.root.parent / "gone")
    until(lambda: not clone.shippers(), "the shipper has left")
    assert not clone.repository.home.exists()
    assert {run.info.status for run in clone.runs()} == {"KILLED"}


def test_an_entry_that_is_being_removed_is_passed_over(clone: FakeClone) -> None:
    entry = clone.entry("sft")
    assert [group.entries for group in Scanner(clone.repository).groups()] == [[entry]]
    (entry.folder / "entry.json").unlink()
    assert Scanner(clone.repository).groups() == []


def test_it_can_be_switched_off(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    clone.run("sft")
    start_shipper(clone.repository)
    assert clone.shippers() == []


@pytest.mark.usefixtures("_as_users_have_it")
def test_it_takes_little_from_the_training(clone: FakeClone) -> None:
    clone.begin("sft")
    start_shipper(clone.repository)
    until(lambda: any(process.nice() == 10 for process in clone.shippers()), "a modest shipper")
    [shipper] = clone.shippers()
    assert shipper.parent() == psutil.Process() or shipper.ppid() == 1
