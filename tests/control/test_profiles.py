"""Profiles are strict, and every one that ships renders for every stage."""

import shutil
from pathlib import Path

import pytest

from pipelines.errors import LockstepError
from pipelines.executors import render_sbatch
from pipelines.profiles import ExecutorKind, load_profile
from stages.contracts.catalog import STAGES

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "slurm_profiles").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    (folder / "slurm_profiles").mkdir()
    (folder / "slurm_profiles" / "mine.yaml").write_text(text)
    return folder


def refused(folder: Path, text: str) -> str:
    with pytest.raises(LockstepError) as caught:
        load_profile(write(folder, text), "mine")
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_renders_for_every_stage(name: str, tmp_path: Path) -> None:
    profile = load_profile(ROOT, name)
    for stage in STAGES:
        script = render_sbatch(stage, tmp_path, profile.resources(stage))
        assert script.startswith("#!/bin/bash")
        assert f"--job-name=lockstep-{stage}" in script


def test_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(LockstepError, match="did you mean 'local'"):
        load_profile(ROOT, "locl")


def test_unknown_key_in_defaults_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "executor: local\ndefaults:\n  cpu_per_task: 2\n")
    assert "mine.yaml:3" in message
    assert "did you mean `defaults.cpus_per_task`?" in message


def test_unknown_key_in_a_stage_override_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "executor: local\nstages:\n  sft: {partitio: x}\n")
    assert "did you mean `stages.sft.partition`?" in message


def test_a_wrong_value_in_a_stage_override_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "executor: local\nstages:\n  sft: {nodes: 0}\n")
    assert "mine.yaml:3: `stages.sft.nodes` is 0 (int)" in message


def test_unknown_stage_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "executor: local\nstages:\n  stf: {nodes: 2}\n")
    assert "did you mean `stages.sft`?" in message


def test_missing_executor_is_named(tmp_path: Path) -> None:
    assert "key `executor` is missing" in refused(tmp_path, "parallel: 2\n")


def test_override_replaces_only_what_it_names(tmp_path: Path) -> None:
    text = "executor: slurm\ndefaults: {nodes: 2, partition: a}\nstages: {sft: {partition: b}}\n"
    profile = load_profile(write(tmp_path, text), "mine")
    assert profile.executor is ExecutorKind.SLURM
    assert (profile.resources("sft").nodes, profile.resources("sft").partition) == (2, "b")
    assert profile.resources("prepare").partition == "a"


def test_every_resource_reaches_the_script(tmp_path: Path) -> None:
    text = """
executor: slurm
defaults:
  nodes: 2
  tasks_per_node: 8
  gpus_per_node: 8
  cpus_per_task: 12
  memory: 512G
  time_minutes: 90
  partition: train
  account: team
  qos: high
  constraint: h200
  exclude: node7
  reservation: march
  gres: gpu:h200:8
  signal_lead_seconds: 120
  setup: [module load cuda]
  container: apptainer exec image.sif
  extra: {mail-type: END}
  python: /opt/python
"""
    resources = load_profile(write(tmp_path, text), "mine").resources("sft")
    script = render_sbatch("sft", tmp_path, resources)
    for flag in (
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=12",
        "--mem=512G",
        "--time=90",
        "--partition=train",
        "--account=team",
        "--qos=high",
        "--constraint=h200",
        "--exclude=node7",
        "--reservation=march",
        "--gres=gpu:h200:8",
        "--signal=USR2@120",
        "--requeue",
        "--mail-type=END",
    ):
        assert f"#SBATCH {flag}" in script, flag
    assert "set -e\nmodule load cuda" in script
    assert "apptainer exec image.sif /opt/python -u -m submitit" in script


def test_rendering_needs_no_slurm(tmp_path: Path) -> None:
    assert shutil.which("sbatch", path=str(tmp_path)) is None
    profile = load_profile(ROOT, "slurm")
    assert "srun" in render_sbatch("rollout@iter_001", tmp_path, profile.resources("rollout"))
