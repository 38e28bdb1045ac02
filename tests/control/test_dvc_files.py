"""What a killed dvc leaves torn is put right, and what a living one is at is left alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo import lock_file
from pipelines.dvc_repo.cache_repair import COPY_AGE_S, RUN_AGE_S, clear_cache
from pipelines.dvc_repo.lock_file import keep_lock, read_stages
from pipelines.dvc_repo.locks import Wait, hold
from pipelines.dvc_repo.repair import Watch, repair_dvc_files
from pipelines.ledger.publish import recorded_outs
from tests.conftest import Clone
from tests.waiting import TIMEOUT_S, until

WHOLE = """\
schema: '2.0'
stages:
  sft:
    cmd: train
    outs:
    - path: model
      md5: a1
"""
MORE = """\
  report:
    cmd: report
    outs:
    - path: page
      md5: b2
"""
CONFLICT = f"<<<<<<< HEAD\n{WHOLE}=======\n{WHOLE}>>>>>>> other\n"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / ".lockstep").mkdir()
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    return Repository(tmp_path)


@pytest.fixture
def lock(repository: Repository) -> Path:
    """A dvc.lock that was seen when it was whole."""
    path = repository.root / "dvc.lock"
    path.write_text(WHOLE)
    keep_lock(repository)
    return path


@pytest.mark.parametrize("length", [0, 7, 23, 29, 41, 52, 64, 66])
def test_a_torn_lock_becomes_what_it_was_when_it_was_last_whole(
    repository: Repository, lock: Path, length: int
) -> None:
    said: list[str] = []
    repair_dvc_files(repository, said.append)
    assert (lock.read_text(), said) == (WHOLE, [])
    lock.write_text(WHOLE[:length])
    keep_lock(repository)
    repair_dvc_files(repository, said.append)
    assert lock.read_text() == WHOLE
    assert "dvc.lock is torn" in said[0]
    assert (repository.home / "dvc.lock.torn").read_text() == WHOLE[:length]


def test_a_lock_that_dvc_is_writing_is_read_when_it_is_whole(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC puts it on disk in pieces, and a piece may end where a stage does."""
    lock = repository.root / "dvc.lock"
    now, rest = 0.0, list[str]()
    with lock.open("w") as file:

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        def write_the_rest(seconds: float) -> None:
            """Between the first look and the second."""
            nonlocal now
            now += seconds
            while rest:
                write(rest.pop())

        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0, sleep=write_the_rest)
        monkeypatch.setattr(lock_file, "time", clock)
        write(WHOLE)
        rest.append(MORE)
        stages = read_stages(repository.root)
        assert stages == YAML(typ="safe").load(WHOLE + MORE)["stages"]
        write("  later:\n    cmd: c\n")
        rest.append("    outs: []\n")
        keep_lock(repository)
    assert (repository.home / "dvc.lock.whole").read_text() == lock.read_text()


def test_a_lock_that_was_cut_while_an_early_stage_changed_is_torn(
    repository: Repository, lock: Path
) -> None:
    lock.write_text(WHOLE + MORE)
    keep_lock(repository)
    lock.write_text(WHOLE.replace("a1", "c3").rstrip("\n"))
    repair_dvc_files(repository, print)
    assert lock.read_text() == WHOLE + MORE


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.rstrip("\n"),
        (WHOLE + MORE).rstrip("\n"),
        WHOLE.replace("a1", "c3").rstrip("\n"),
        "schema: '2.0'\n",
        "schema: '2.0'\nstages: {}\n",
        "schema: '2.0'\ndatasets:\n- name: prompts\n  type: url\n",
        f"# by hand\n{WHOLE}",
        CONFLICT,  # is left to people
    ],
)
def test_a_whole_lock_is_left_alone_however_it_was_written(
    repository: Repository, lock: Path, text: str
) -> None:
    lock.write_text(text)
    repair_dvc_files(repository, print)
    assert lock.read_text() == text


@pytest.mark.parametrize("committed", [False, True], ids=["in the index", "in the last commit"])
def test_a_lock_that_git_has_is_not_torn(
    repository: Repository, lock: Path, committed: bool
) -> None:
    lock.write_text("stages: [")
    git = ["git", "-C", str(repository.root), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "dvc.lock"], check=True)
    if committed:
        subprocess.run([*git, "commit", "-q", "-m", "broken"], check=True)
        subprocess.run([*git, "rm", "-q", "--cached", "dvc.lock"], check=True)
    repair_dvc_files(repository, print)
    assert lock.read_text() == "stages: ["


def test_what_is_kept_is_what_was_found_whole(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, is_whole = repository.root / "dvc.lock", lock_file._is_whole
    lock.write_text(WHOLE)

    def asked_before_dvc_writes(text: bytes) -> bool:
        lock.write_text("")
        return is_whole(text)

    monkeypatch.setattr(lock_file, "_is_whole", asked_before_dvc_writes)
    keep_lock(repository)
    assert lock.read_text() == ""
    assert (repository.home / "dvc.lock.whole").read_text() == WHOLE


@pytest.mark.parametrize("cut", ["", WHOLE[:41], WHOLE[:66]], ids=["empty", "no outs", "no hash"])
def test_hashes_are_read_from_a_whole_lock_alone(
    repository: Repository, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLED_S", "READ_TIMEOUT_S"):
        monkeypatch.setattr(f"pipelines.dvc_repo.lock_file.{name}", TIMEOUT_S)
    lock = repository.root / "dvc.lock"
    lock.write_text(cut)
    writer = threading.Timer(0.5, lock.write_text, [WHOLE])
    writer.start()
    assert recorded_outs(repository.root) == {"sft": {"model": "a1"}}
    writer.join()


def test_a_lock_without_its_last_newline_is_read_when_nobody_writes(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.dvc_repo.lock_file.SETTLED_S", 0.1)
    (repository.root / "dvc.lock").write_text(WHOLE.rstrip("\n"))
    assert recorded_outs(repository.root) == {"sft": {"model": "a1"}}


def test_a_lock_that_stays_empty_is_not_read_as_one_without_stages(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.dvc_repo.lock_file.READ_TIMEOUT_S", 0.2)
    (repository.root / "dvc.lock").write_text("")
    with pytest.raises(LockstepError, match="lockstep record"):
        recorded_outs(repository.root)


@pytest.mark.parametrize("hardlink", [False, True], ids=["usual locks", "hard links"])
def test_locks_are_those_that_dvc_takes(repository: Repository, hardlink: bool) -> None:
    from dvc.lock import LockError, make_lock

    (repository.root / ".dvc/config").write_text(f"[core]\n    hardlink_lock = {hardlink}\n")
    folder = repository.root / ".dvc/tmp"

    def of_dvc() -> Any:
        return make_lock(str(folder / "lock"), tmp_dir=str(folder), hardlink_lock=hardlink)

    with hold(repository, "lock", Wait.YES, print) as held:
        assert held
        with pytest.raises(LockError):
            of_dvc().lock()
    with of_dvc(), hold(repository, "lock", Wait.NO, print) as held:
        assert not held
    with hold(repository, "lock", Wait.NO, print) as held:
        assert held


def test_who_waits_for_dvc_says_so_and_who_does_not_goes_on(repository: Repository) -> None:
    lock, said = repository.root / "dvc.lock", list[str]()
    lock.write_text("")
    with hold(repository, "lock", Wait.YES, print):
        repair_dvc_files(repository, said.append, Wait.NO)
        assert (lock.exists(), said) == (True, [])
        waiting = threading.Thread(target=repair_dvc_files, args=(repository, said.append))
        waiting.start()
        until(lambda: said, "it says that it waits")
        assert waiting.is_alive()
        assert lock.exists()
        assert ".dvc/tmp/lock" in said[0]
    waiting.join(TIMEOUT_S)
    assert not lock.exists(), "it was never whole"


def test_what_another_node_is_writing_is_not_torn(
    repository: Repository, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.write_text("")
    clock = SimpleNamespace(sleep=lambda _: lock.write_text(WHOLE + MORE))
    monkeypatch.setattr("pipelines.dvc_repo.repair.time", clock)
    repair_dvc_files(repository, print)
    assert lock.read_text() == WHOLE + MORE
    assert not (repository.home / "dvc.lock.torn").exists()


def test_a_process_that_runs_anyway_repairs_what_it_sees_torn_twice(
    repository: Repository, busy: Path
) -> None:
    lock, watch = repository.root / "dvc.lock", Watch(repository)
    watch.repair()
    lock.write_text(WHOLE)
    keep_lock(repository)
    watch.repair()
    watch.repair()
    lock.write_text("")
    busy.write_text("{")
    watch.repair()
    assert (lock.read_text(), busy.read_text()) == ("", "{"), "DVC may be writing"
    watch.repair()
    assert lock.read_text() == WHOLE
    assert not busy.exists()


def test_a_process_that_runs_anyway_looks_through_the_cache_once_a_minute(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = repository.root / ".dvc/cache/files/md5/.z.tmp"
    copy.parent.mkdir(parents=True)
    watch = Watch(repository)
    copy.write_text("")
    watch.repair()
    assert not copy.exists()
    copy.write_text("")
    watch.repair()
    assert copy.exists()
    monkeypatch.setattr("pipelines.dvc_repo.repair.CACHE_INTERVAL_S", 0.0)
    watch.repair()
    assert not copy.exists()


def half_done(cache: Path) -> list[Path]:
    """What a killed dvc leaves in a cache, beside what is whole."""
    torn = [cache / "runs/aa/aa1/.x.tmp", cache / "runs/cc/cc1/.y.tmp", cache / "files/md5/.z.tmp"]
    for path in (cache / "runs/aa/aa1/b2", cache / "files/md5/aa/b3", *torn):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    empty = cache / "runs/dd/dd1"
    empty.mkdir(parents=True)
    return [*torn, empty, cache / "runs/cc/cc1"]


def test_what_dvc_left_half_done_in_its_cache_goes(repository: Repository) -> None:
    cache = repository.root / ".dvc/cache"
    torn = half_done(cache)
    clear_cache(repository, Wait.NO, print)
    assert (cache / "runs/aa/aa1/b2").exists()
    assert (cache / "files/md5/aa/b3").exists()
    assert not any(path.exists() for path in torn)


@pytest.mark.parametrize("who", ["a dvc", "an experiment", "a queued one", "another clone"])
def test_what_somebody_may_be_at_stays_until_it_is_old(repository: Repository, who: str) -> None:
    cache, tmp = repository.root / ".dvc/cache", repository.root / ".dvc/tmp"
    if who == "an experiment":
        (tmp / "exps/standalone/tmp1").mkdir(parents=True)
    elif who == "a queued one":
        (tmp / "exps/tmp1").mkdir(parents=True)
    elif who == "another clone":
        cache = repository.root / "elsewhere"
        (repository.root / ".dvc/config").write_text("[cache]\n    dir = ../elsewhere\n")
    torn = half_done(cache)

    def clear() -> None:
        if who == "a dvc":
            with hold(repository, "lock", Wait.YES, print):
                clear_cache(repository, Wait.NO, print)
        else:
            clear_cache(repository, Wait.YES, print)

    clear()
    assert all(path.exists() for path in torn)
    _age(torn, RUN_AGE_S + 60)
    clear()
    assert [path.exists() for path in torn] == [True, True, True, False, True]
    _age([path for path in torn if path.exists()], COPY_AGE_S + 60)
    clear()
    assert not any(path.exists() for path in torn)


def _age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def busy(repository: Repository) -> Path:
    """DVC's list of busy paths."""
    return repository.root / ".dvc/tmp/rwlock"


def repaired(repository: Repository, busy: Path, listed: dict[str, Any]) -> dict[str, Any]:
    """What is left of a list."""
    busy.write_text(json.dumps(listed))
    repair_dvc_files(repository, print)
    return dict(json.loads(busy.read_text()))


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with these arguments."""
    program = [sys.executable, "-c", "input()", *words]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_busy_paths_are_freed_unless_who_has_them_lives(repository: Repository, busy: Path) -> None:
    repair_dvc_files(repository, print)
    with running("repro", "-s", "sft") as dvc, running("plan") as plan, running("ls") as other:
        with subprocess.Popen(["true"]) as ended:
            pass
        theirs = [
            {"pid": dvc.pid, "cmd": "/a/bin/dvc repro -s sft"},
            {"pid": dvc.pid, "cmd": "/a b/site-packages/dvc/__main__.py repro -s sft"},
            {"pid": plan.pid, "cmd": "/a/bin/lockstep plan"},
        ]
        # A process that was given the number of a dvc that is dead; and a dvc that is gone.
        dead = {"pid": other.pid, "cmd": "/a/bin/dvc repro -s sft"}
        gone = {"pid": ended.pid, "cmd": "/a/bin/dvc repro -s sft"}
        listed = {
            "write": {"/a": theirs[0], "/b": dead, "/c": gone},
            "read": {"/d": [dead], "/e": [dead, *theirs]},
        }
        wanted = {"write": {"/a": theirs[0]}, "read": {"/e": theirs}}
        assert repaired(repository, busy, listed) == wanted
        os.kill(dvc.pid, signal.SIGKILL)
        until(lambda: psutil.Process(dvc.pid).status() == psutil.STATUS_ZOMBIE, "it is dead")
        assert repaired(repository, busy, wanted) == {"write": {}, "read": {"/e": [theirs[2]]}}
    busy.write_text("")
    repair_dvc_files(repository, print)
    assert not busy.exists()


def test_a_process_that_may_not_be_looked_at_lives(
    repository: Repository, busy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: psutil.Process) -> list[str]:
        raise psutil.AccessDenied(process.pid)

    repair_dvc_files(repository, print)
    monkeypatch.setattr(psutil.Process, "cmdline", refuse)
    listed = {"write": {"/a": {"pid": os.getpid(), "cmd": "dvc repro"}}, "read": {}}
    assert repaired(repository, busy, listed) == listed


def test_nothing_is_concluded_about_processes_of_another_host(
    repository: Repository, busy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = socket.gethostname()
    with subprocess.Popen(["true"]) as ended:
        pass
    listed = {"write": {"/a": {"pid": ended.pid, "cmd": "dvc repro"}}, "read": {}}
    for _ in range(2):  # nobody has taken notes yet
        assert repaired(repository, busy, listed) == listed
    busy.unlink()
    repair_dvc_files(repository, print)
    for host in ("another", "another", here):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert repaired(repository, busy, listed) == listed, "processes of either may be in it"
    repaired(repository, busy, {})
    assert repaired(repository, busy, listed) == {"write": {}, "read": {}}


def test_a_stage_repairs_what_it_is_about_to_read(clone: Clone) -> None:
    repository, lock = Repository(clone.root), clone.root / "dvc.lock"
    lock.write_text(WHOLE)
    keep_lock(repository)
    lock.write_text("")
    shown = clone.run("lockstep", "stage", "sft", "--profile", "slurm", "--dry-run").stdout
    assert "dvc.lock is torn" in shown
    assert lock.read_text() == WHOLE
