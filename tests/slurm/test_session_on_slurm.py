"""A session in an allocation: one job serves stage after stage, and its end ends none of them."""

import json
from typing import Any

from ruamel.yaml import YAML

from tests.waiting import PATIENCE_S


def up(clone: Any, stages: str) -> dict[str, Any]:
    said = clone.run("lockstep", "session", "up", "--stages", stages, "--json").stdout
    session: dict[str, Any] = json.loads(said)
    return session


def executors(clone: Any, stage: str) -> list[str]:
    paths = sorted(clone.root.glob(f".lockstep/jobs/{stage}/*/attempts/*/launch.json"))
    return [json.loads(path.read_text())["executor"] for path in paths]


def recorded(lock: str, stage: str) -> Any:
    return YAML().load(lock)["stages"][stage]


def test_one_job_serves_stages_with_the_bytes_that_they_have_at_home(
    slurm_clone: Any, pipeline_lock: str
) -> None:
    shown = slurm_clone.run("lockstep", "session", "up", "--stages", "sft", "--dry-run").stdout
    assert "-m pipelines.worker.session_host" in shown
    assert "#SBATCH --job-name=lockstep-session-main" in shown
    assert not slurm_clone.jobs()
    session = up(slurm_clone, "sft,reward_model")
    slurm_clone.run("lockstep", "run", "sft", "reward_model")
    for stage in ("sft", "reward_model"):
        assert executors(slurm_clone, stage) == ["session"]
        assert recorded(slurm_clone.lock(), stage) == recorded(pipeline_lock, stage)
    assert slurm_clone.jobs() == [session["job"]]
    assert "no live job is unwanted" in slurm_clone.run("lockstep", "status", "--orphans").stdout
    said = json.loads(slurm_clone.run("lockstep", "session", "status", "--json").stdout)[0]
    assert (said["state"], said["job"]) == ("running", session["job"])
    slurm_clone.run("lockstep", "session", "down")
    slurm_clone.until(lambda: not slurm_clone.jobs(), "an empty queue")


def test_a_stage_whose_session_slurm_ends_goes_on_in_a_job_of_its_own(long_sft: Any) -> None:
    long_sft.set_params(sft__epochs=200)
    session = up(long_sft, "sft")
    driver = long_sft.start("dvc", "repro", "--single-item", "sft")
    long_sft.training()
    long_sft.cluster.run("scancel", session["job"])
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output
    assert "its session ended" in output or "exited without reporting a result" in output
    assert executors(long_sft, "sft") == ["session", "slurm"]
    assert long_sft.steps() == list(range(1, 201))
