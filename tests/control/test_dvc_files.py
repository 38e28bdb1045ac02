"""What a killed dvc leaves torn is put right, and what a living one is at is left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.dvc_files import Watch, clear_cache, keep_lock, mend_dvc_files
from pipelines.repository import Repository

WHOLE = """\
schema: '2.0'
stages:
  sft:
    cmd: train
    outs:
    - path: model
      md5: a1
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / ".lockstep").mkdir()
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    return Repository(tmp_path)


@pytest.mark.parametrize("length", [0, 7, 14, 23, 29, 41, 52, 64, 66])
def test_a_torn_lock_becomes_what_it_was_when_it_was_last_whole(
    repository: Repository, length: int
) -> None:
    lock, said = repository.root / "dvc.lock", list[str]()
    lock.write_text(WHOLE)
    keep_lock(repository)
    mend_dvc_files(repository, said.append)
    assert (lock.read_text(), said) == (WHOLE, [])
    lock.write_text(WHOLE[:length])
    keep_lock(repository)
    mend_dvc_files(repository, said.append)
    assert lock.read_text() == WHOLE
    assert "dvc.lock is torn" in said[0]


def test_a_conflict_in_the_lock_is_left_to_people(repository: Repository) -> None:
    lock = repository.root / "dvc.lock"
    lock.write_text(WHOLE)
    keep_lock(repository)
    conflict = f"<<<<<<< HEAD\n{WHOLE}=======\n{WHOLE}>>>>>>> other\n"
    lock.write_text(conflict)
    mend_dvc_files(repository, print)
    assert lock.read_text() == conflict


def test_a_process_that_runs_anyway_mends_what_it_sees_torn(repository: Repository) -> None:
    lock, busy = repository.root / "dvc.lock", repository.root / ".dvc/tmp/rwlock"
    watch = Watch(repository)
    watch.look()
    lock.write_text(WHOLE)
    keep_lock(repository)
    watch.look()
    lock.write_text("")
    busy.write_text("{")
    watch.look()
    assert lock.read_text() == WHOLE
    assert not busy.exists()


def test_what_dvc_left_half_done_in_its_cache_goes(repository: Repository) -> None:
    cache = repository.root / ".dvc/cache"
    whole = [cache / "runs/aa/aa1/b2", cache / "files/md5/aa/b3"]
    torn = [cache / "runs/aa/aa1/.x.tmp", cache / "runs/cc/cc1/.y.tmp", cache / "files/md5/.z.tmp"]
    for path in (*whole, *torn):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    empty = cache / "runs/dd/dd1"
    empty.mkdir(parents=True)
    clear_cache(repository)
    assert all(path.exists() for path in whole)
    assert not any(path.exists() for path in torn)
    assert not empty.exists()
    assert not (cache / "runs/cc/cc1").exists()


def test_a_torn_lock_that_was_never_whole_goes(repository: Repository) -> None:
    lock = repository.root / "dvc.lock"
    lock.write_text("")
    mend_dvc_files(repository, print)
    assert not lock.exists()


def test_busy_paths_are_freed_unless_a_living_dvc_has_them(repository: Repository) -> None:
    busy = repository.root / ".dvc/tmp/rwlock"
    program = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen([*program, "dvc"], stdin=subprocess.PIPE) as living,
        subprocess.Popen(program, stdin=subprocess.PIPE) as another,
    ):
        theirs = {"pid": living.pid, "cmd": "dvc repro"}
        # A process that was given the number of a dvc that is dead.
        dead = {"pid": another.pid, "cmd": "dvc repro"}
        listed = {"write": {"/a": theirs, "/b": dead}, "read": {"/c": [dead], "/d": [dead, theirs]}}
        busy.write_text(json.dumps(listed))
        mend_dvc_files(repository, print)
        wanted = {"write": {"/a": theirs}, "read": {"/d": [theirs]}}
        assert json.loads(busy.read_text()) == wanted
        living.communicate(b"\n")
        another.communicate(b"\n")
    busy.write_text("")
    mend_dvc_files(repository, print)
    assert not busy.exists()
