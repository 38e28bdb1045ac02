"""A session in an allocation: one job serves stage after stage, and its end ends none of them."""

import json
from pathlib import Path
from typing import Any

from pipelines.dvc_repo.lock_file import read_stages
from tests.slurm.conftest import SERVED, RunOnSlurm
from tests.waiting import succeeded


def up(clone: Any, stages: str) -> dict[str, Any]:
    said = clone.run("lockstep", "session", "up", "--stages", stages, "--json").stdout
    session: dict[str, Any] = json.loads(said)
    return session


def executors(clone: Any, stage: str) -> list[str]:
    return [each.launched.executor for each in clone.attempt(stage=stage).entry.attempts()]


def test_one_job_serves_stages_with_the_bytes_that_they_have_at_home(
    pipeline_on_slurm: RunOnSlurm, pipeline_root: Path
) -> None:
    """Of the whole pipeline, all bytes of which are compared: test_stages.py."""
    clone, session = pipeline_on_slurm.clone, pipeline_on_slurm.session
    stages = read_stages(clone.root)
    served = [name for name in stages if name.partition("@")[0] in SERVED]
    assert len(served) == len(SERVED)
    for stage in served:
        assert executors(clone, stage) == ["session"]
        assert stages[stage] == read_stages(pipeline_root)[stage]
    assert executors(clone, "reward_model") == ["slurm"]
    assert pipeline_on_slurm.jobs == [session["job"]]
    assert "no live job is unwanted" in pipeline_on_slurm.orphans
    [said] = pipeline_on_slurm.sessions
    assert (said["state"], said["job"]) == ("running", session["job"])
    clone.until(lambda: not clone.jobs(), "an empty queue")


def test_a_dry_run_of_a_session_submits_nothing(slurm_clone: Any) -> None:
    shown = slurm_clone.run("lockstep", "session", "up", "--stages", "sft", "--dry-run").stdout
    assert "-m pipelines.worker.session_host" in shown
    assert "#SBATCH --job-name=lockstep-session-main" in shown
    assert not slurm_clone.jobs()


def test_a_stage_whose_session_slurm_ends_goes_on_in_a_job_of_its_own(long_sft: Any) -> None:
    long_sft.set_params(sft__epochs=200)
    long_sft.hold()
    session = up(long_sft, "sft")
    driver, _ = long_sft.start_training()
    long_sft.cluster.run("scancel", session["job"])
    long_sft.until(lambda: len(executors(long_sft, "sft")) == 2, "a job of its own")
    long_sft.release()
    output = succeeded(driver)
    assert "its session ended" in output or "exited without reporting a result" in output
    assert executors(long_sft, "sft") == ["session", "slurm"]
    assert long_sft.steps() == list(range(1, 201))
