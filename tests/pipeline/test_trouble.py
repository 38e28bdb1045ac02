"""What goes wrong outside the code: each ends in a clear error, and nothing is lost."""

import json
import os
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SECRET = "planted-4f9d2c77e1"


def failure(clone: Any, *words: str, **environment: str) -> str:
    done = clone.run(*words, check=False, **environment)
    assert done.returncode != 0
    return str(done.stdout)


def test_a_mistyped_param_is_named_before_anything_runs(tiny_clone: Any) -> None:
    path = tiny_clone.root / "params.yaml"
    path.write_text(path.read_text().replace("demonstrations:", "demonstratons:"))
    stage = ("dvc", "repro", "--single-item", "prepare")
    for command in (("lockstep", "run"), ("lockstep", "plan"), stage):
        assert "did you mean `prepare.demonstrations`?" in failure(tiny_clone, *command)
    assert not (tiny_clone.root / "dvc.lock").exists()


def test_an_unknown_profile_is_named(tiny_clone: Any) -> None:
    message = failure(tiny_clone, "lockstep", "run", "--profile", "slrm")
    assert "unknown profile 'slrm'; did you mean 'slurm'?" in message
    stage = ("dvc", "repro", "--single-item", "prepare")
    assert "'slrm'" in failure(tiny_clone, *stage, LOCKSTEP_PROFILE="slrm")


def test_a_row_without_a_needed_column_is_named_by_file_and_line(tiny_clone: Any) -> None:
    tiny_clone.without_tracking()
    data = tiny_clone.root / "data"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(4)]
    rows[2].pop("completion")
    (data / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_clone.set_params(prepare__source="files")
    message = failure(tiny_clone, "dvc", "repro", "--single-item", "prepare")
    assert "demonstrations.jsonl" in message
    assert "completion" in message
    assert ":3" in message or "line 3" in message
    assert not (tiny_clone.root / "artifacts/base").exists()


def test_a_full_disk_fails_the_stage_and_leaves_nothing_half_written(finished: Any) -> None:
    finished.without_tracking()
    lock = (finished.root / "dvc.lock").read_bytes()
    private = ("unshare", "--map-root-user", "--mount")
    if finished.run(*private, "true", check=False).returncode:
        pytest.skip("a small disk needs a mount namespace, which this system does not allow")
    small_disk = "mount -t tmpfs -o size=80k small .lockstep/jobs"
    command = f"{small_disk} && exec dvc repro --single-item --force sft"
    message = failure(finished, *private, "sh", "-c", command)
    assert "No space left on device" in message
    assert "fix the cause, then run the same command" in message
    assert not (finished.root / "artifacts/policies/sft/model").exists()
    finished.run("dvc", "repro", "--single-item", "--force", "sft")
    assert (finished.root / "dvc.lock").read_bytes() == lock


def test_an_mlflow_server_that_is_down_does_not_stop_the_run(finished: Any) -> None:
    finished.set_params(report__samples=1)
    down = "http://127.0.0.1:9"
    finished.run("dvc", "repro", MLFLOW_TRACKING_URI=down)
    entry = max((finished.root / ".lockstep/jobs/report").glob("*"), key=os.path.getmtime)
    assert (entry / "record.json").exists()
    finished.run("lockstep", "sync")
    assert json.loads((entry / "tracking.json").read_text())["run_id"]


def test_secrets_of_the_environment_reach_nothing(finished: Any) -> None:
    secrets = {"HF_TOKEN": SECRET, "SOME_PASSWORD": SECRET + "x", "WANDB_API_KEY": SECRET + "y"}
    path = finished.root / "stages/report.py"
    leak = (
        "\nimport os\nprint('leak', os.environ['HF_TOKEN'])"
        "\nraise OSError(os.environ['SOME_PASSWORD'])\n"
    )
    whole = path.read_text()
    finished.write_code("stages/report.py", whole + leak)
    failure(finished, "dvc", "repro", "--single-item", "report", **secrets)
    finished.write_code("stages/report.py", whole)
    finished.run("dvc", "repro", "--force", "--single-item", "report", **secrets)
    finished.run("lockstep", "sync", **secrets)
    logs = finished.run("lockstep", "logs", "report").stdout
    found = [
        str(path)
        for path in finished.root.rglob("*")
        if path.is_file() and "tests" not in path.parts and SECRET.encode() in path.read_bytes()
    ]
    assert found == []
    assert "***" in "".join(
        path.read_text() for path in (finished.root / ".lockstep/jobs/report").rglob("*_log.out")
    ), logs


def test_a_dry_run_prints_every_script_and_submits_nothing(tiny_clone: Any) -> None:
    script = tiny_clone.run("lockstep", "run", "--profile", "slurm-8gpu", "--dry-run").stdout
    assert script.count("#!/bin/bash") == 9
    assert "#SBATCH --gpus-per-node=8" in script
    assert "tail -F" in script
    stages = json.loads(_status(tiny_clone))["stages"]
    assert {row["state"] for row in stages} <= {"stale", "waiting"}


def _status(clone: Any) -> str:
    shown: str = clone.run("lockstep", "status", "--json").stdout
    return shown
