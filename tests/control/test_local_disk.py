"""A node's disk as a cache: entries that are whole, made once, and removed by their last use."""

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from pipelines.config.stage_in import StageIn
from pipelines.worker.local_disk import LocalDisk, NoRoom, open_disk
from tests.waiting import TIMEOUT_S, until

FORK = multiprocessing.get_context("fork")
MB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> LocalDisk:
    return open_disk(StageIn(folder=str(tmp_path / "local"), size="10M"))


def put(disk: LocalDisk, name: str, megabytes: int = 1) -> None:
    """Make an entry, which nobody holds then."""
    disk.use(name, megabytes * MB, lambda folder: grow(folder, megabytes)).close()


def grow(folder: Path, megabytes: int) -> None:
    (folder / "data").write_bytes(bytes(megabytes * MB))


def entries(disk: LocalDisk) -> list[str]:
    return sorted(path.name for path in disk.folder.iterdir() if not path.name.startswith("."))


def never(_: Path) -> None:
    raise AssertionError("it is there already")


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = StageIn(folder="$TMPDIR/local", size="10M")
    folder = open_disk(settings).folder
    assert folder.parent == tmp_path / "local"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(OSError, match="others may change or read it"):
        open_disk(settings)
    folder.chmod(0o700)
    folder.parent.chmod(0o1777)
    open_disk(settings)
    folder.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="sticky"):
        open_disk(settings)
    for wrong in ("/no/such/disk", "$NO_SUCH_VARIABLE/local"):
        with pytest.raises(FileNotFoundError):
            open_disk(StageIn(folder=wrong, size="10M"))


def test_the_least_recently_used_goes_first_and_never_what_is_held(disk: LocalDisk) -> None:
    for age, name in enumerate("dcba"):
        put(disk, name, 2)
        os.utime(disk.folder / name / ".size", (age, age))
    held = disk.hold("d")
    assert held
    disk.use("c", 0, never).close()  # just used
    put(disk, "new", 4)
    assert entries(disk) == ["a", "c", "d", "new"]
    with pytest.raises(NoRoom, match=r"that `stage_in\.size` allows"):
        put(disk, "large", 11)
    assert entries(disk) == ["a", "c", "d", "new"], "nothing went for what can never fit"
    with pytest.raises(NoRoom):
        put(disk, "large", 9)
    assert entries(disk) == ["d"]
    held.close()
    put(disk, "large", 9)
    assert entries(disk) == ["large"]


def test_an_entry_that_a_cleaner_of_disks_was_at_is_made_anew(disk: LocalDisk) -> None:
    """Such programs remove single files that are old; locks that are in use do not look old."""
    put(disk, "a")
    lock = disk.folder / ".a.lock"
    os.utime(lock, (0, 0))
    (disk.folder / "a/data").unlink()
    (disk.folder / "a/.size").unlink()
    put(disk, "a")
    assert (disk.folder / "a/data").stat().st_size == MB
    assert lock.stat().st_mtime > 0


def test_an_input_may_be_called_anything(disk: LocalDisk) -> None:
    put(disk, "hash.aside")
    put(disk, "other")
    assert entries(disk) == ["hash.aside", "other"]


def test_a_copy_that_fails_leaves_nothing(disk: LocalDisk) -> None:
    def fail(folder: Path) -> None:
        grow(folder, 1)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        disk.use("a", MB, fail)
    assert [path.name for path in disk.folder.iterdir()] == [".room"]


def test_one_process_makes_an_entry_and_another_takes_over_when_it_is_killed(
    disk: LocalDisk, tmp_path: Path
) -> None:
    """Two wait for a third, which is killed in the middle; one of them makes it anew."""
    log, gate = tmp_path / "log", tmp_path / "gate"

    def say(what: str, number: int = 0) -> None:
        with log.open("a", buffering=1) as file:
            file.write(f"{what} {number} {os.getpid()}\n")

    def said(what: str, number: int = 0) -> list[int]:
        """The processes that said so, in order."""
        lines = [line.split() for line in (log.read_text() if log.exists() else "").splitlines()]
        return [int(words[2]) for words in lines if words[:2] == [what, str(number)]]

    def fill(folder: Path) -> None:
        grow(folder, 1)
        say("making")
        until(gate.exists, "the gate opens")
        (folder / "whole").touch()

    def work() -> None:
        held = disk.use("a", MB, fill, lambda there: say("waiting", there))
        say("done", int((held.path / "whole").exists()))

    processes = [FORK.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    waiting = until(lambda: said("waiting", MB), "somebody waits, and sees how far it is")
    [maker] = said("making")
    assert maker not in waiting
    os.kill(maker, signal.SIGKILL)
    until(lambda: len(said("making")) == 2, "another one makes it")
    gate.touch()
    for process in processes:
        process.join(TIMEOUT_S)
    assert set(said("done", 1)) == {each.pid for each in processes} - {maker}
    assert len(said("making")) == 2


def test_what_a_killed_process_left_is_removed_by_the_next_and_not_what_is_being_made(
    disk: LocalDisk,
) -> None:
    for name in ("killed", "living"):
        (disk.folder / f".{name}.aside").mkdir()
        (disk.folder / f".{name}.aside/.size").write_text(str(6 * MB))
    with (disk.folder / ".living.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        put(disk, "a", 3)
        with pytest.raises(NoRoom):
            put(disk, "b", 5)  # the 6 MB that are being made are taken
    assert not (disk.folder / ".killed.aside").exists()
    put(disk, "b", 5)
