"""Samplers on a node of their own: the bytes of those that learn alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks.clones import copy_clone
from tests.slurm.conftest import on_slurm
from tests.stages.conftest import Runner
from tests.stages.test_online import GRPO
from tests.stages.test_online_ranks import FUSED, go_through, left

pytestmark = pytest.mark.slow

ONLINE = FUSED[0]
APART = {"nodes": 2, "tasks_per_node": 2, "gpus_per_node": 2, "memory": "3600M", "samplers": 2}


def test_a_job_whose_second_node_samples(pipeline_root: Path, tmp_path: Path, cluster: Any) -> None:
    copy_clone(pipeline_root, tmp_path / "clone")
    clone = on_slurm(tmp_path / "clone", cluster)
    clone.set_params(rl__online={"fast": {"policy": "sft", "steps": 2}})
    clone.set_params(**{f"rl__{key}": value for key, value in GRPO.items()})
    clone.set_profile(partition="gpu", online=APART)
    clone.run("dvc", "repro", "--single-item", ONLINE)
    attempt = clone.attempt(stage=ONLINE)
    assert [task.state for task in attempt.tasks] == ["completed", "done", "done", "done"]
    made_by = attempt.result.environment
    assert (made_by["world"], made_by["samplers"]) == (2, 2)

    alone = Runner(tmp_path / "alone")
    shutil.copytree(pipeline_root / "artifacts", alone.root / "artifacts")
    params = YAML(typ="safe").load(pipeline_root / "params.yaml")
    go_through(alone, FUSED, GRPO, params, 2, "none")
    assert left(Runner(clone.root), "fast") == left(alone, "fast")
