"""Jobs whose node has a disk of its own: what one has copied, the next one finds."""

from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import copy_of_other_code
from tests.slurm.light_stages import DIGESTING_STAGE

LOOK = """
    print("reads", *inputs.values(), flush=True)
    print("saves to", ctx.local and ctx.local.folder, flush=True)
"""
STAGES = ("sft", "reward_model")


@pytest.mark.slow
def test_jobs_of_a_node_share_what_was_copied_to_its_disk(slurm_clone: Any, tmp_path: Path) -> None:
    """Both stages read `artifacts/base`; their bytes depend on all that they read."""
    for stage in STAGES:
        slurm_clone.write_code(f"stages/{stage}.py", DIGESTING_STAGE)
        slurm_clone.begin_with(stage, LOOK)
    slurm_clone.commit("digests")
    at_home = copy_of_other_code(slurm_clone.root, tmp_path / "home")
    disk = tmp_path / "disk"
    stage_in = {"stage_in": {"folder": str(disk), "size": "1G"}}
    slurm_clone.set_profile(**dict.fromkeys(STAGES, stage_in))
    logs = {}
    for stage in STAGES:
        for clone in (at_home, slurm_clone):
            clone.run("dvc", "repro", "--single-item", stage)
        logs[stage] = slurm_clone.run("lockstep", "logs", stage).stdout
        assert f"reads {disk}/" in logs[stage]
        assert f"saves to {disk}/" in logs[stage]
    assert "base: copied to this node's disk" in logs["sft"]
    assert "base: found on this node's disk" in logs["reward_model"]
    assert slurm_clone.lock() == (at_home.root / "dvc.lock").read_text()
    assert not list(disk.glob("*/checkpoints.*")), "a stage that is done needs none"
