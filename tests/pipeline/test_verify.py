"""`lockstep verify` on a finished clone: what was done to it is named, and the remedy works."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Ledger
from pipelines.results.verify import Verification, verify
from tests.ledger_values import launch
from tests.pipeline.conftest import commands

pytestmark = pytest.mark.slow

MODEL = "artifacts/policies/sft/model"
WEIGHTS = f"{MODEL}/model.safetensors"
PROMPTS = "artifacts/data/prompts.parquet"


@pytest.fixture(autouse=True)
def _only_the_artifacts(finished: Any) -> None:
    finished.without_tracking()


def look(clone: Any, *targets: str, whole_cache: bool = False) -> Verification:
    return verify(Repository(clone.root), list(targets), whole_cache=whole_cache)


def kinds(verdict: Verification) -> dict[str, str]:
    return {finding.path: finding.kind.value for finding in verdict.findings}


def find_and_repair(
    clone: Any, expected: dict[str, str], *targets: str, which: int = 0, whole_cache: bool = False
) -> Verification:
    """What is found must be this, and its remedy must be enough."""
    verdict = look(clone, *targets, whole_cache=whole_cache)
    assert kinds(verdict) == expected
    for command in dict.fromkeys(finding.remedies[which] for finding in verdict.findings):
        for words in commands(command):
            clone.run(*words)
    assert look(clone, whole_cache=True).findings == []
    assert "up to date" in clone.run("dvc", "status").stdout
    return verdict


def md5_of(clone: Any, path: str) -> str:
    lock = YAML(typ="safe").load(clone.root / "dvc.lock")["stages"]
    outs = {out["path"]: str(out["md5"]) for stage in lock.values() for out in stage["outs"]}
    if path in outs:
        return outs[path]
    folder = path.rpartition("/")[0]
    rows = json.loads(cache_of(clone, outs[folder]).read_text())
    return next(row["md5"] for row in rows if f"{folder}/{row['relpath']}" == path)


def cache_of(clone: Any, md5: str) -> Path:
    place: Path = clone.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    return place


def tamper(path: Path) -> None:
    """Flip one bit in the middle, and leave size, times and mode as they were."""
    stat = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)[0]
        file.seek(stat.st_size // 2)
        file.write(bytes([byte ^ 1]))
    path.chmod(stat.st_mode)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def state_of_files(root: Path) -> dict[Path, tuple[int, ...]]:
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_mode)
        for folder in ("artifacts", "metrics", ".dvc/cache")
        for path in (root / folder).rglob("*")
    }


def test_what_is_as_recorded_is_read_and_left_alone(finished: Any) -> None:
    for path in (finished.root / "artifacts").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state_of_files(finished.root)
    done = finished.run("lockstep", "verify", "--json")
    verdict = json.loads(done.stdout)
    assert verdict["findings"] == []
    lock = YAML(typ="safe").load(finished.root / "dvc.lock")["stages"]
    assert verdict["outputs"] == sum(len(stage["outs"]) for stage in lock.values())
    assert verdict["bytes"] > sum(
        path.stat().st_size for path in (finished.root / "artifacts").rglob("*") if path.is_file()
    )
    assert state_of_files(finished.root) == before


def test_one_bit_of_a_model_is_found_though_dvc_cannot_see_it(finished: Any) -> None:
    assert "up to date" in finished.run("dvc", "status").stdout  # DVC remembers the hashes
    tamper(finished.root / WEIGHTS)
    assert "up to date" in finished.run("dvc", "status").stdout
    done = finished.run("lockstep", "verify", check=False)
    assert done.returncode == 1
    assert f"  {WEIGHTS}  (sft)\n" in done.stdout
    verdict = find_and_repair(finished, {WEIGHTS: "changed"})
    assert "link" not in verdict.findings[0].detail


def test_with_hard_links_both_copies_are_changed_and_the_remote_has_the_third(
    finished: Any, tmp_path: Path
) -> None:
    finished.run("dvc", "remote", "add", "-d", "store", str(tmp_path / "store"))
    finished.run("dvc", "push")
    finished.run("dvc", "config", "cache.type", "hardlink")
    finished.run("dvc", "checkout", "--relink")
    tamper(finished.root / WEIGHTS)
    verdict = find_and_repair(finished, {WEIGHTS: "changed"})
    assert "both are changed" in verdict.findings[0].detail


def test_without_a_remote_the_stage_makes_the_same_bytes_again(finished: Any) -> None:
    finished.run("dvc", "config", "cache.type", "hardlink")
    finished.run("dvc", "checkout", "--relink")
    lock = (finished.root / "dvc.lock").read_bytes()
    tamper(finished.root / "artifacts/report/index.html")
    find_and_repair(finished, {"artifacts/report/index.html": "changed"}, "report", which=-1)
    assert (finished.root / "dvc.lock").read_bytes() == lock


def test_files_that_come_go_or_are_renamed_are_named(finished: Any) -> None:
    tamper(finished.root / WEIGHTS)
    (finished.root / MODEL / "notes.txt").write_text("mine")
    (finished.root / MODEL / "config.json").rename(finished.root / MODEL / "old.json")
    (finished.root / PROMPTS).unlink()
    shutil.rmtree(finished.root / "artifacts/policies/sft/state")
    expected = {
        WEIGHTS: "changed",
        f"{MODEL}/notes.txt": "extra",
        f"{MODEL}/old.json": "extra",
        f"{MODEL}/config.json": "missing",
        PROMPTS: "missing",
        "artifacts/policies/sft/state": "missing",
    }
    verdict = find_and_repair(finished, expected)
    details = {finding.path: finding.detail for finding in verdict.findings}
    assert f"{MODEL}/config.json" in details[f"{MODEL}/old.json"]
    assert details[f"{MODEL}/notes.txt"] == ""


def test_a_truncated_table_and_an_edited_metric_are_changed(finished: Any) -> None:
    path = finished.root / PROMPTS
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    metric = finished.root / "metrics/sft.json"
    metric.write_text(metric.read_text().replace("0", "1", 1))
    verdict = find_and_repair(finished, {PROMPTS: "changed", "metrics/sft.json": "changed"})
    assert f"({len(content) // 2:,} bytes)" in verdict.findings[0].detail


def test_rot_in_the_cache_is_found_where_the_workspace_is_whole(finished: Any) -> None:
    """DVC itself takes a read-only object at its word."""
    objects = [cache_of(finished, md5_of(finished, path)) for path in (WEIGHTS, PROMPTS)]
    for path in objects:
        tamper(path)
    cache_of(finished, md5_of(finished, f"{MODEL}/generation_config.json")).unlink()
    expected = {
        str(objects[0]): "rotted",
        str(objects[1]): "rotted",
        f"{MODEL}/generation_config.json": "uncached",
    }
    find_and_repair(finished, expected, "sft", PROMPTS)


def test_without_the_list_of_its_files_a_folder_is_judged_as_a_whole(finished: Any) -> None:
    listing = cache_of(finished, md5_of(finished, MODEL))
    tamper(listing)
    find_and_repair(finished, {str(listing): "rotted"})
    listing.unlink()
    find_and_repair(finished, {MODEL: "uncached"})
    listing.unlink()
    tamper(finished.root / WEIGHTS)
    verdict = look(finished)
    assert kinds(verdict) == {MODEL: "changed"}
    assert "no file can be named" in verdict.findings[0].detail


def test_a_hash_edited_in_dvc_lock_is_told_from_a_changed_artifact(finished: Any) -> None:
    lock = finished.root / "dvc.lock"
    for path in (PROMPTS, MODEL):
        md5 = md5_of(finished, path)
        other = md5[:-8].translate(str.maketrans("0123456789abcdef", "123456789abcdef0")) + md5[-8:]
        lock.write_text(lock.read_text().replace(md5, other))
    verdict = look(finished)
    assert kinds(verdict) == {PROMPTS: "changed", MODEL: "changed"}
    assert all("git diff dvc.lock" in finding.detail for finding in verdict.findings)
    finished.run("git", "checkout", "--", "dvc.lock")
    assert look(finished).findings == []


def test_a_link_to_another_disk_is_followed(finished: Any, tmp_path: Path) -> None:
    shutil.move(finished.root / "artifacts", tmp_path / "elsewhere")
    (finished.root / "artifacts").symlink_to(tmp_path / "elsewhere")
    assert look(finished).findings == []
    tamper(tmp_path / "elsewhere/policies/sft/model/model.safetensors")
    done = finished.run("lockstep", "verify", WEIGHTS, check=False)
    assert done.returncode == 1
    assert WEIGHTS in done.stdout
    assert look(finished, "prepare").findings == []


def test_a_clone_without_artifacts_is_not_called_tampered_with(
    finished: Any, tmp_path: Path
) -> None:
    finished.run("git", "clone", "-q", str(finished.root), str(tmp_path / "fresh"))
    fresh = type(finished)(tmp_path / "fresh")
    done = fresh.run("lockstep", "verify", "--json", check=False)
    assert done.returncode == 1
    found = json.loads(done.stdout)["findings"]
    assert {finding["kind"] for finding in found} == {"lost"}
    assert {finding["path"].split("/")[0] for finding in found} == {"artifacts"}
    done = fresh.run("lockstep", "verify", check=False)
    assert "nothing was tampered with: `dvc pull`" in done.stdout


def test_the_whole_cache_is_read_wherever_it_is(finished: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.move(finished.root / ".dvc/cache", cache)
    finished.run("dvc", "cache", "dir", str(cache))
    old = cache / "files/md5" / "00" / ("0" * 30)
    old.parent.mkdir(exist_ok=True)
    old.write_text("what an earlier commit names")
    assert look(finished).findings == []
    find_and_repair(finished, {str(old): "rotted"}, whole_cache=True)


def test_targets_are_stages_or_paths_and_anything_else_is_an_error(finished: Any) -> None:
    tamper(finished.root / WEIGHTS)
    for targets, expected in (
        (["sft"], 1),
        ([WEIGHTS], 1),
        (["artifacts/policies"], 1),
        ([f"{MODEL}/config.json"], 0),
        (["rollout", "metrics/sft.json"], 0),
    ):
        done = finished.run("lockstep", "verify", *targets, check=False)
        assert done.returncode == expected, targets
    below = type(finished)(finished.root / "artifacts/policies")
    done = below.run("lockstep", "verify", "sft/model", check=False)
    assert (done.returncode, f"  {WEIGHTS}  (sft)\n" in done.stdout) == (1, True)
    for target, hint in (("stf", "'sft'"), (f"{MODEL}/nothing", "no such file")):
        done = finished.run("lockstep", "verify", target, check=False)
        assert (done.returncode, hint in done.stdout) == (2, True)


def test_what_dvc_lock_does_not_record_and_what_dvc_yaml_no_longer_names(finished: Any) -> None:
    finished.set_params(rl__iterations={"iter_002": {"policy": "sft"}})
    assert look(finished).findings == []
    old = "artifacts/policies/iter_001/model/model.safetensors"
    tamper(finished.root / old)
    new = "artifacts/policies/iter_002/model"
    (finished.root / new).mkdir(parents=True)
    (finished.root / new / "model.safetensors").write_text("not made by any stage")
    assert kinds(look(finished)) == {old: "changed", new: "unrecorded"}
    assert kinds(look(finished, "rollout@iter_002")) != {}
    shutil.rmtree(finished.root / "artifacts/policies/iter_001")
    assert old not in kinds(look(finished))


def test_a_stage_that_runs_is_left_out(finished: Any) -> None:
    entry = Ledger(finished.root / ".lockstep/jobs").latest("sft")["sft"]
    (entry.folder / "record.json").unlink()
    attempt = entry.new_attempt(launch())
    shutil.rmtree(finished.root / MODEL)
    with ExitStack() as lock:
        lock.enter_context(hold_lock(attempt.folder / "alive"))
        verdict = look(finished)
        assert (verdict.findings, verdict.skipped) == ([], ["sft"])
