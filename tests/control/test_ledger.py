"""The state of a job is read off its files and its lock, so no death needs a repair."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.processes import start_of, this_process
from pipelines.identity.code import code_version
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import Artifact, Spec, make_spec
from pipelines.ledger import files
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.publish import drop_recorded, publish
from pipelines.ledger.state import State
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from tests.control.made_up import SPEC, write_outputs
from tests.ledger_values import ORIGIN, launch, record, result, worker
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def finished(entry: Entry) -> Entry:
    """As a worker leaves it: complete outputs and a result."""
    attempt = entry.new_attempt(launch())
    write_outputs(entry)
    attempt.write(result(outs={"artifacts/model": "m.dir"}, metrics={}))
    return entry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What an earlier job has published."""
    folder = tmp_path / "artifacts/model"
    folder.mkdir(parents=True)
    (folder / "stale").write_text("old")
    return folder


def let_dvc_record(root: Path, md5: str) -> None:
    lock = {"stages": {"sft": {"outs": [{"path": "artifacts/model", "md5": md5}]}}}
    (root / "dvc.lock").write_text(json.dumps(lock) + "\n")


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    SPEC.write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json") == SPEC


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"seed": 2}},
        {"code": "def"},
        {"inputs": {"base": Artifact("artifacts/base", "other")}},
        {"stage": "reward_model"},
    ],
)
def test_whatever_bears_identity_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(SPEC, **change).fingerprint != SPEC.fingerprint


def test_a_spec_follows_the_stages_code_and_inputs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    bound = bind("sft", Params())
    for path in bound.inputs.values():
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "artifacts/base/config.json").write_text("{}")

    def fingerprint() -> str:
        code = code_version(tmp_path, bound.stage.module)
        return make_spec(tmp_path, bound, HashCache(), code).fingerprint

    before = fingerprint()
    assert fingerprint() == before
    unrelated = tmp_path / "stages/evaluate.py"
    unrelated.write_text(unrelated.read_text() + "\nMORE = 1\n")
    assert fingerprint() == before
    code = tmp_path / "stages/engines/training/loop.py"
    code.write_text(code.read_text() + "\n# A comment.\n")
    assert fingerprint() == before
    code.write_text(code.read_text() + "\nMORE = 1\n")
    changed = fingerprint()
    assert changed != before
    (tmp_path / "artifacts/base/config.json").write_text("{ }")
    assert fingerprint() not in (before, changed)


def test_an_unfinished_entry_is_found_again(ledger: Ledger, entry: Entry) -> None:
    assert ledger.find_or_create(SPEC, ORIGIN) == entry
    assert ledger.find_or_create(replace(SPEC, code="other"), ORIGIN) != entry


@pytest.mark.parametrize("clock_off_by", [0, 86400], ids=["", "the clock was set back"])
def test_the_latest_entry_is_the_one_last_asked_for(
    ledger: Ledger, entry: Entry, clock_off_by: float
) -> None:
    """Going back to old params makes their job the wanted one again."""
    os.utime(entry.folder / "entry.json", (time.time() + clock_off_by,) * 2)
    other = ledger.find_or_create(replace(SPEC, code="other"), ORIGIN)
    assert ledger.latest()["sft"] == other
    ledger.find_or_create(SPEC, ORIGIN)
    assert ledger.latest()["sft"] == entry


def test_an_entry_whose_maker_was_killed_half_way_is_made_anew(ledger: Ledger) -> None:
    (ledger.folder / "sft").mkdir(parents=True)
    half = atomic.unique(ledger.folder / "sft" / f"{SPEC.fingerprint[:12]}-001")
    half.mkdir()
    (half / "entry.json").write_text("{}")
    assert ledger.find_or_create(SPEC, ORIGIN).spec == SPEC
    assert len(ledger.entries()) == 1


def test_states_of_an_attempt(entry: Entry) -> None:
    assert entry.state() is State.NEW
    attempt = entry.new_attempt(launch())
    assert entry.state() is State.STARTING
    attempt.write(launch(pid=os.getpid(), pid_started=start_of(os.getpid())))
    assert entry.state() is State.STARTING
    attempt.write(launch(pid=os.getpid(), pid_started="another"))
    assert entry.state() is State.DIED, "the pid belongs to another process by now"
    with hold_lock(attempt.folder / "alive"):
        assert entry.state() is State.RUNNING
        attempt.mark_cancelled()
        assert entry.state() is State.RUNNING, "it still runs, whatever was asked of it"
    assert entry.state() is State.CANCELLED
    again = entry.new_attempt(launch())
    again.write(result("failed", error="e"))
    assert entry.state() is State.FAILED
    assert [a.number for a in entry.attempts()] == [1, 2]


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_that_starts_while_one_looks_has_not_died(
    entry: Entry, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Between two looks of a process that a busy machine keeps waiting, a worker may do a lot."""
    attempt = entry.new_attempt(launch())
    attempt.write(launch(pid=os.getpid(), pid_started=start_of(os.getpid())))

    def is_locked_before_it_starts(path: Path) -> bool:
        found = is_locked(path)
        attempt.write(worker())
        if ends:
            attempt.write(result())
        return found

    monkeypatch.setattr("pipelines.ledger.entry.is_locked", is_locked_before_it_starts)
    assert attempt.state() is (State.COMPLETED if ends else State.STARTING)


def test_a_submission_whose_driver_died_is_given_up_at_once_unless_its_job_is_there(
    entry: Entry,
) -> None:
    attempt = entry.new_attempt(launch())
    assert attempt.state() is State.STARTING, "this process is about to submit it"
    attempt.write(launch(submitter=replace(this_process(), started="another")))
    assert attempt.state() is State.DIED
    assert attempt.never_started
    command = [sys.executable, "-c", "input()", str(attempt.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as job:
        # The kill came before its number was noted.
        until(lambda: attempt.state() is State.STARTING, "the job is seen")
        job.communicate(b"\n")
    assert attempt.state() is State.DIED


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from pipelines.base.locks import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(4000)"
    )
    path = tmp_path / "alive"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_locked(path)
    process.kill()
    process.wait()
    assert not is_locked(path)


def test_one_driver_at_a_time(entry: Entry) -> None:
    with (
        entry.lease(),
        pytest.raises(LockstepError, match="already waiting for this job"),
        entry.lease(),
    ):
        pass


def test_publishing_keeps_the_ledgers_copy_until_dvc_has_recorded_it(
    ledger: Ledger, finished: Entry, tmp_path: Path
) -> None:
    assert finished.state() is State.COMPLETED
    publish(tmp_path, finished)
    assert (tmp_path / "artifacts/model/weights").read_text() == "w"
    assert finished.state() is State.PUBLISHED
    drop_recorded(tmp_path, ledger)
    assert ledger.find_or_create(SPEC, ORIGIN) == finished, "DVC has not recorded it"
    let_dvc_record(tmp_path, "m.dir")
    drop_recorded(tmp_path, ledger)
    assert not finished.out.exists()
    assert ledger.find_or_create(SPEC, ORIGIN) != finished, "recorded: a forced run computes again"


def test_a_lock_that_names_older_outputs_does_not_take_the_ledgers_copy(
    ledger: Ledger, finished: Entry, tmp_path: Path
) -> None:
    publish(tmp_path, finished)
    let_dvc_record(tmp_path, "older.dir")
    drop_recorded(tmp_path, ledger)
    assert (finished.out / "model/weights").read_text() == "w"


def test_publishing_twice_replaces_what_was_there(
    finished: Entry, tmp_path: Path, model: Path
) -> None:
    for _ in range(2):
        publish(tmp_path, finished)
        assert [path.name for path in model.iterdir()] == ["weights"]


def test_outputs_on_another_disk_are_never_half_there_under_their_name(
    finished: Entry, tmp_path: Path, model: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(model, other_disk)
    model.parent.rmdir()
    model.parent.symlink_to(other_disk)
    (finished.out / "model/tokenizer").write_text("t")
    copied: list[str] = []
    really_copy = shutil.copyfile

    def killed_in_the_middle(source: str, target: str, **options: bool) -> str:
        copied.append(target)
        if len(copied) == 2:
            os._exit(9)
        return really_copy(source, target, **options)

    killed = os.fork()
    if not killed:
        monkeypatch.setattr(shutil, "copyfile", killed_in_the_middle)
        publish(tmp_path, finished)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    assert [path.name for path in model.iterdir()] == ["stale"], "what was there is whole"
    publish(tmp_path, finished)
    assert sorted(path.name for path in model.iterdir()) == ["tokenizer", "weights"]
    assert [path.name for path in other_disk.iterdir()] == ["model"]
    assert not (finished.folder / "publishing").exists()


def test_a_failed_publication_leaves_what_was_there(
    finished: Entry, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="broken"):
            publish(tmp_path, finished)
    assert (model / "stale").read_text() == "old"


def test_a_worker_killed_after_its_last_rename_is_harvested_with_what_made_its_outputs(
    finished: Entry, tmp_path: Path
) -> None:
    attempt = finished.attempts()[-1]
    (attempt.folder / "result.json").unlink()
    made_by = {"host": "node1", "packages": {"torch": "2"}}
    attempt.write(worker(time=5.0, environment=made_by))
    assert finished.state() is State.COMPLETED
    made = publish(tmp_path, finished)
    assert (made.environment, made.started) == (made_by, 5.0)
    assert made.outs["artifacts/model"].endswith(".dir")


def test_stages_that_start_together_may_both_drop_what_is_recorded(tmp_path: Path) -> None:
    """Each looks, then renames: whoever is second finds nothing there, which is fine."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom pipelines.ledger.entry import Ledger\n"
        "from pipelines.ledger.publish import drop_recorded\nroot = Path(sys.argv[1])\n"
        "while not (root / 'go').exists(): time.sleep(0.001)\n"
        "drop_recorded(root, Ledger(root / 'jobs'))\n"
    )
    lock = {"schema": "2.0", "stages": {}}
    for number in range(40):
        stage, folder = f"s{number}", tmp_path / f"jobs/s{number}/f-001"
        (folder / "out/model").mkdir(parents=True)
        files.write(folder / "record.json", record(outs={f"a/{stage}": "0"}))
        outs = [{"path": f"a/{stage}", "md5": "0"}]
        lock["stages"][stage] = {"cmd": "true", "outs": outs}  # type: ignore[index]
    (tmp_path / "dvc.lock").write_text(json.dumps(lock) + "\n")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    time.sleep(1)
    (tmp_path / "go").touch()
    assert ["".join(process.communicate()[1]) for process in running] == [""] * 4
    assert not list(tmp_path.glob("jobs/*/*/out*"))
