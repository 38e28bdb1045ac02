"""A session in an allocation: one job serves stage after stage, and its end ends none of them."""

import json
from pathlib import Path
from typing import Any

from pipelines.dvc_repo.lock_file import read_stages
from tests.waiting import succeeded


def up(clone: Any, stages: str) -> dict[str, Any]:
    said = clone.run("lockstep", "session", "up", "--stages", stages, "--json").stdout
    session: dict[str, Any] = json.loads(said)
    return session


def executors(clone: Any, stage: str) -> list[str]:
    return [each.launched.executor for each in clone.attempt(stage=stage).entry.attempts()]


def test_one_job_serves_stages_with_the_bytes_that_they_have_at_home(
    slurm_clone: Any, pipeline_root: Path
) -> None:
    shown = slurm_clone.run("lockstep", "session", "up", "--stages", "sft", "--dry-run").stdout
    assert "-m pipelines.worker.session_host" in shown
    assert "#SBATCH --job-name=lockstep-session-main" in shown
    assert not slurm_clone.jobs()
    session = up(slurm_clone, "sft,reward_model")
    slurm_clone.run("lockstep", "run", "sft", "reward_model")
    for stage in ("sft", "reward_model"):
        assert executors(slurm_clone, stage) == ["session"]
        assert read_stages(slurm_clone.root)[stage] == read_stages(pipeline_root)[stage]
    assert slurm_clone.jobs() == [session["job"]]
    assert "no live job is unwanted" in slurm_clone.run("lockstep", "status", "--orphans").stdout
    said = json.loads(slurm_clone.run("lockstep", "session", "status", "--json").stdout)[0]
    assert (said["state"], said["job"]) == ("running", session["job"])
    slurm_clone.run("lockstep", "session", "down")
    slurm_clone.until(lambda: not slurm_clone.jobs(), "an empty queue")


def test_a_stage_whose_session_slurm_ends_goes_on_in_a_job_of_its_own(long_sft: Any) -> None:
    long_sft.set_params(sft__epochs=200)
    session = up(long_sft, "sft")
    driver, _ = long_sft.start_training()
    long_sft.cluster.run("scancel", session["job"])
    output = succeeded(driver)
    assert "its session ended" in output or "exited without reporting a result" in output
    assert executors(long_sft, "sft") == ["session", "slurm"]
    assert long_sft.steps() == list(range(1, 201))
