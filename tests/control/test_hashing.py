"""Our hashes are DVC's hashes."""

import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from pipelines.hashing import HashCache


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


def test_a_remembered_hash_is_dropped_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    first = HashCache(tmp_path / "cache.json")
    before = first.of(path)
    first.save()
    path.write_text("two!")
    assert HashCache(tmp_path / "cache.json").of(path) != before
