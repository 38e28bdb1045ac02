"""What a job does before its stage begins: it checks what it reads, and notes what it runs on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FLIP = """
import os, sys
path = sys.argv[1]
before = os.stat(path)
with open(path, "r+b") as file:
    file.seek(-1, 2)
    last = file.read(1)[0]
    file.seek(-1, 2)
    file.write(bytes([last ^ 1]))
os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
"""


def profile(clone: Any, name: str, **defaults: object) -> str:
    said = {"executor": "local", "defaults": defaults}
    (clone.root / f"slurm_profiles/{name}.yaml").write_text(json.dumps(said))
    return name


def newest(clone: Any, stage: str) -> Path:
    records = (clone.root / f".lockstep/jobs/{stage}").glob("*/record.json")
    return max(records, key=lambda path: path.stat().st_mtime)


def newest_record(clone: Any, stage: str) -> dict[str, Any]:
    return dict(json.loads(newest(clone, stage).read_text()))


def worker_of(clone: Any, stage: str) -> dict[str, Any]:
    """What the worker of the newest attempt said of itself at its start."""
    attempt = max((newest(clone, stage).parent / "attempts").iterdir())
    return dict(json.loads((attempt / "worker.json").read_text()))


def test_an_input_that_rots_between_submission_and_start_fails_the_stage(finished: Any) -> None:
    finished.without_tracking()
    (finished.root / "flip.py").write_text(FLIP)
    folder = finished.root / "artifacts/evaluations"
    file = next(path for path in (folder / "iter_001").iterdir())
    # A copy of its own: a hard link would let the cache rot as well.
    shutil.copy2(file, file.with_suffix(".own"))
    file.with_suffix(".own").replace(file)
    file.chmod(0o644)
    name = profile(finished, "rotten", setup=[f"python {finished.root}/flip.py {file}"])
    stage = "report"  # which imports little: with a setup it is no fork of a process that has
    done = finished.run(
        "dvc", "repro", "--single-item", "--force", stage, check=False, LOCKSTEP_PROFILE=name
    )
    assert done.returncode
    recorded = newest_record(finished, stage)["inputs"]["artifacts/evaluations"]
    said = " ".join(done.stdout.split())
    assert f"its input `evaluations` at {folder} is not what the stage was submitted" in said
    assert f"and was {recorded}" in said
    assert "dvc checkout" in said
    assert not (finished.root / "artifacts/report").exists()
    # As the message advises.
    finished.run("dvc", "checkout", "--force", "evaluate@iter_001", "evaluate_sft")
    finished.run("dvc", "repro", "--single-item", stage)


def test_on_the_cpu_determinism_changes_no_byte_and_the_record_says_which_it_was(
    finished: Any,
) -> None:
    finished.without_tracking()
    lock = (finished.root / "dvc.lock").read_bytes()
    name = profile(finished, "loose", deterministic=False)
    for stage in ("sft", "rollout@iter_001", "policy_update@iter_001"):
        before = newest_record(finished, stage)["environment"]
        assert (before["deterministic"], before["deterministic_algorithms"]) == (True, True)
        finished.run("dvc", "repro", "--single-item", "--force", stage, LOCKSTEP_PROFILE=name)
        after = newest_record(finished, stage)["environment"]
        assert (after["deterministic"], after["deterministic_algorithms"]) == (False, False)
        assert worker_of(finished, stage)["environment"] == after, "known before the last word"
        changed = {key for key in before if before[key] != after[key]}
        assert changed == {"deterministic", "deterministic_algorithms"}
    assert (finished.root / "dvc.lock").read_bytes() == lock
