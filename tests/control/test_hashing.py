"""Our hashes are DVC's hashes."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.dvc_repo.contents import Content, Contents
from pipelines.identity import digests
from pipelines.identity.hashing import HashCache, Interrupted, hash_bytes, hash_listing
from stages.context import Context


def dvc(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dvc", *words], cwd=folder, check=True, capture_output=True
    )


def test_files_and_folders_hash_as_dvc_does(tmp_path: Path) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "b.txt").write_text("b")
    (tmp_path / "tree" / "a.txt").write_text("a\r\n")
    (tmp_path / "tree" / "inner" / "ü.bin").write_bytes(bytes(range(256)))
    (tmp_path / "tree" / "run.sh").write_text("true")
    (tmp_path / "tree" / "run.sh").chmod(0o755)
    (tmp_path / "single.json").write_text("{}")
    dvc(tmp_path, "init", "--no-scm")
    dvc(tmp_path, "add", "tree", "single.json")
    hashes = HashCache()
    for name in ("tree", "single.json"):
        recorded = YAML(typ="safe").load((tmp_path / f"{name}.dvc").read_text())["outs"][0]["md5"]
        assert hashes.of(tmp_path / name) == recorded
        assert hash_bytes(tmp_path / name) == recorded


def test_a_remembered_hash_is_dropped_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    first = HashCache(tmp_path / "cache.json")
    before = first.of(path)
    first.save()
    path.write_text("two!")
    assert HashCache(tmp_path / "cache.json").of(path) != before


def test_a_file_that_changes_within_its_size_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    hashes = HashCache()
    before = hashes.of(path)
    later = path.stat().st_mtime_ns + 1_000_000
    path.write_text("two")
    os.utime(path, ns=(later, later))
    assert hashes.of(path) != before


def flip_a_byte(path: Path) -> None:
    """As a disk rots: another byte under the same size, time and inode."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_bytes_that_rot_behind_an_unchanged_time_are_seen_by_who_reads_them_all(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(name.encode() * 3_000_000)
    hashes = HashCache()
    before = hashes.of(folder)
    assert hash_bytes(folder) == before
    flip_a_byte(folder / "b")
    assert hashes.of(folder) == before
    assert hash_bytes(folder) != before


def test_hashing_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless")
    # Somebody has the other end open and writes nothing: without being asked, this never ends.
    end = os.open(tmp_path / "endless", os.O_RDWR)
    asked = iter([False, True])

    def should_stop() -> bool:
        stop = next(asked)
        if stop:
            os.write(end, b"x" * 2)
            os.close(end)
        return stop

    with pytest.raises(Interrupted):
        hash_bytes(tmp_path / "endless", should_stop)


def test_what_goes_away_while_a_workspace_is_looked_at_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("a", "b", "c", "d"):
        (folder / name).write_bytes(name.encode() * 2_000_000)
    kept = {name: HashCache().of(folder / name) for name in ("a", "d")}

    def remove_two(path: Path) -> str | None:
        """A stage at work: one file goes before it was looked at, one before it was read."""
        if path.name in ("a", "b"):
            (folder / {"a": "c", "b": "b"}[path.name]).unlink(missing_ok=True)
        return None

    hashes = HashCache(elsewhere=remove_two)
    contents = Contents(tmp_path, tmp_path / "cache", hashes, frozenset())
    contents.read(["policy", "policy/a"])
    assert contents.now("policy") == Content(hash_listing(kept))
    assert contents.now("policy/a") == Content(kept["a"])
    with pytest.raises(FileNotFoundError, match="policy/b"):
        hashes.of_files([folder / "a", folder / "b"])


def test_a_hash_is_remembered_only_of_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one" * 1_000_000)
    time = path.stat().st_mtime_ns - 1_000_000_000
    os.utime(path, ns=(time, time))
    first = HashCache().of(path)

    def replace(_: Path) -> str | None:
        """As a restore from DVC's cache does, between the look at a file and its reading."""
        path.write_bytes(b"two" * 1_000_000)
        return None

    hashes = HashCache(elsewhere=replace)
    assert hashes.of(path) != first
    path.write_bytes(b"one" * 1_000_000)
    os.utime(path, ns=(time, time))
    hashes._elsewhere = None
    assert hashes.of(path) == first


def test_what_goes_away_when_it_is_about_to_be_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No real race hits this moment surely: what reads a file removes it first."""
    read = digests._digest
    gone, kept = tmp_path / "gone", tmp_path / "kept"
    gone.write_text("gone")
    kept.write_text("kept")

    def read_too_late(path: Path, *others: Any) -> Any:
        gone.unlink(missing_ok=True)
        return read(path, *others)

    monkeypatch.setattr(digests, "_digest", read_too_late)
    assert set(HashCache().of_those_there([gone, kept])) == {kept}


def context(tmp_path: Path) -> Context:
    return Context(stage="sft", key=None, seed=1, folder=tmp_path)


def test_what_a_stage_says_of_a_file_that_it_wrote_is_believed(tmp_path: Path) -> None:
    path, ctx, hashes = tmp_path / "weights", context(tmp_path), HashCache()
    path.write_text("one")
    ctx.wrote(path, "0" * 32)  # not so, which shows that nobody looks
    hashes.believe(ctx.written)
    assert hashes.of(path) == "0" * 32


def rewrite(path: Path) -> None:
    path.write_text("two")


def put_the_time_back(path: Path) -> None:
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another_in_its_place(path: Path) -> None:
    before, other = path.stat(), path.with_name("other")
    other.write_text("two")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


CHANGES = [rewrite, flip_a_byte, put_the_time_back, put_another_in_its_place]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_stage_said_of_a_file_that_was_touched_since_is_not_believed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path, ctx = tmp_path / "weights", context(tmp_path)
    path.write_text("one")
    ctx.wrote(path, HashCache().of(path))
    time.sleep(0.02)  # the clock of a file system may tick a hundred times a second
    change(path)
    hashes = HashCache()
    hashes.believe(ctx.written)
    assert hashes.of(path) == hashlib.md5(path.read_bytes()).hexdigest()


def test_a_file_that_went_away_since_is_none(tmp_path: Path) -> None:
    path, ctx, hashes = tmp_path / "weights", context(tmp_path), HashCache()
    path.write_text("one")
    ctx.wrote(path, "0" * 32)
    path.unlink()
    hashes.believe(ctx.written)
    assert hashes.of_those_there([path]) == {}


def test_only_an_md5_of_a_file_that_is_there_can_be_said(tmp_path: Path) -> None:
    path, ctx = tmp_path / "weights", context(tmp_path)
    with pytest.raises(FileNotFoundError, match="weights"):
        ctx.wrote(path, "0" * 32)
    path.write_text("one")
    for wrong in ("0" * 31, "0" * 32 + ".dir", "F" * 32, ""):
        with pytest.raises(ValueError, match="is no md5"):
            ctx.wrote(path, wrong)
