"""The state of a job is read off its files and its lock, so no death needs a repair."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from tests.ledger_values import ORIGIN, launch, record, result, worker
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def spec(**changes: object) -> Spec:
    values = {
        "stage": "sft",
        "name": "sft",
        "key": None,
        "config": {"seed": 1},
        "code": "abc",
        "inputs": {"base": Artifact("artifacts/base", "h")},
        "outs": {"model": "artifacts/model"},
        "metrics": "metrics/sft.json",
    }
    return Spec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / ".lockstep/jobs")


def finish(entry: Entry) -> None:
    """As a worker leaves it: complete outputs and a result."""
    attempt = entry.new_attempt(launch())
    (entry.out / "model").mkdir(parents=True)
    (entry.out / "model" / "weights").write_text("w")
    (entry.out / "metrics").write_text('{"loss": 1}')
    attempt.write(result(outs={"artifacts/model": "m.dir"}, metrics={}))


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec().write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json") == spec()


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"seed": 2}},
        {"code": "def"},
        {"inputs": {"base": Artifact("artifacts/base", "other")}},
        {"stage": "reward_model"},
    ],
)
def test_whatever_bears_identity_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert spec(**change).fingerprint != spec().fingerprint


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


def test_an_unfinished_entry_is_found_again(ledger: Ledger) -> None:
    first = ledger.find_or_create(spec(), ORIGIN)
    assert ledger.find_or_create(spec(), ORIGIN) == first
    assert ledger.find_or_create(spec(code="other"), ORIGIN) != first


def test_the_latest_entry_is_the_one_last_asked_for(ledger: Ledger) -> None:
    """Going back to old params makes their job the wanted one again."""
    first = ledger.find_or_create(spec(), ORIGIN)
    other = ledger.find_or_create(spec(code="other"), ORIGIN)
    assert ledger.latest()["sft"] == other
    ledger.find_or_create(spec(), ORIGIN)
    assert ledger.latest()["sft"] == first


def test_an_entry_whose_maker_was_killed_half_way_is_made_anew(ledger: Ledger) -> None:
    (ledger.folder / "sft").mkdir(parents=True)
    half = atomic.unique(ledger.folder / "sft" / f"{spec().fingerprint[:12]}-001")
    half.mkdir()
    (half / "entry.json").write_text("{}")
    assert ledger.find_or_create(spec(), ORIGIN).spec == spec()
    assert len(ledger.entries()) == 1


def test_states_of_an_attempt(ledger: Ledger) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
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


def test_a_submission_whose_driver_died_is_given_up_at_once_unless_its_job_is_there(
    ledger: Ledger,
) -> None:
    attempt = ledger.find_or_create(spec(), ORIGIN).new_attempt(launch())
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


def test_the_entry_last_asked_for_is_the_newest_even_when_the_clock_was_set_back(
    ledger: Ledger,
) -> None:
    before = ledger.find_or_create(spec(), ORIGIN)
    tomorrow = time.time() + 86400
    os.utime(before.folder / "entry.json", (tomorrow, tomorrow))
    after = ledger.find_or_create(spec(code="other"), ORIGIN)
    assert ledger.latest()[after.stage] == after
    ledger.find_or_create(spec(), ORIGIN)
    assert ledger.latest()[after.stage] == before


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from pipelines.base.locks import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
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


def test_one_driver_at_a_time(ledger: Ledger) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
    with (
        entry.lease(),
        pytest.raises(LockstepError, match="already waiting for this job"),
        entry.lease(),
    ):
        pass


def test_publishing_keeps_the_ledgers_copy_until_dvc_has_recorded_it(
    ledger: Ledger, tmp_path: Path
) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    assert entry.state() is State.COMPLETED
    publish(tmp_path, entry)
    assert (tmp_path / "artifacts/model/weights").read_text() == "w"
    assert entry.state() is State.PUBLISHED
    drop_recorded(tmp_path, ledger)
    assert ledger.find_or_create(spec(), ORIGIN) == entry, (
        "DVC has not recorded it: still to be had"
    )
    lock = {"stages": {"sft": {"outs": [{"path": "artifacts/model", "md5": "m.dir"}]}}}
    (tmp_path / "dvc.lock").write_text(json.dumps(lock) + "\n")
    drop_recorded(tmp_path, ledger)
    assert not entry.out.exists()
    assert ledger.find_or_create(spec(), ORIGIN) != entry, "recorded: a forced run computes again"


def test_a_lock_that_names_older_outputs_does_not_take_the_ledgers_copy(
    ledger: Ledger, tmp_path: Path
) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    publish(tmp_path, entry)
    lock = {"stages": {"sft": {"outs": [{"path": "artifacts/model", "md5": "older.dir"}]}}}
    (tmp_path / "dvc.lock").write_text(json.dumps(lock) + "\n")
    drop_recorded(tmp_path, ledger)
    assert (entry.out / "model/weights").read_text() == "w"


def test_publishing_twice_replaces_what_was_there(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "artifacts/model").mkdir(parents=True)
    (tmp_path / "artifacts/model/stale").write_text("old")
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    for _ in range(2):
        publish(tmp_path, entry)
        assert [p.name for p in (tmp_path / "artifacts/model").iterdir()] == ["weights"]


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_outputs_on_another_disk_are_never_half_there_under_their_name(
    ledger: Ledger, tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "artifacts").symlink_to(other_disk)
    model = tmp_path / "artifacts/model"
    model.mkdir()
    (model / "stale").write_text("old")
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    (entry.out / "model/tokenizer").write_text("t")
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
        publish(tmp_path, entry)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    assert [path.name for path in model.iterdir()] == ["stale"], "what was there is whole"
    publish(tmp_path, entry)
    assert sorted(path.name for path in model.iterdir()) == ["tokenizer", "weights"]
    assert [path.name for path in other_disk.iterdir()] == ["model"]
    assert not (entry.folder / "publishing").exists()


def test_a_failed_publication_leaves_what_was_there(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "artifacts/model").mkdir(parents=True)
    (tmp_path / "artifacts/model/stale").write_text("old")
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="broken"):
            publish(tmp_path, entry)
    assert (tmp_path / "artifacts/model/stale").read_text() == "old"


def test_a_worker_killed_after_its_last_rename_is_harvested(ledger: Ledger, tmp_path: Path) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    (entry.attempts()[-1].folder / "result.json").unlink()
    entry.attempts()[-1].write(worker(time=5.0))
    assert entry.state() is State.COMPLETED
    assert publish(tmp_path, entry).outs["artifacts/model"].endswith(".dir")


def test_a_worker_that_died_after_its_outputs_leaves_what_made_them(
    tmp_path: Path, ledger: Ledger
) -> None:
    entry = ledger.find_or_create(spec(), ORIGIN)
    finish(entry)
    attempt = entry.attempts()[-1]
    (attempt.folder / "result.json").unlink()
    made_by = {"host": "node1", "packages": {"torch": "2"}}
    attempt.write(worker(time=5.0, environment=made_by))
    made = publish(tmp_path, entry)
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
