"""Hands on a running job: a command in its allocation, and what it uses."""

import json
from pathlib import Path
from typing import Any

from pipelines.config.profiles import Resources
from pipelines.slurm.script import Batch, batch_script
from tests.waiting import succeeded, until

# No node here has a GPU: this says what a real one says, in its words.
NVIDIA_SMI = """#!/bin/sh
echo '0, NVIDIA H200, 87, 71680, 143771'
echo '1, NVIDIA H200, [N/A], 0, 143771'
"""


def stand_in(folder: Path, name: str, script: str) -> str:
    """A command that is found before the real one; the line of `setup` that sees to it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    return f"export PATH={folder}:$PATH"


def test_a_command_runs_in_the_allocation_of_a_running_stage(
    medium_sft: Any, tmp_path: Path
) -> None:
    found_first = stand_in(tmp_path / "bin", "nvidia-smi", NVIDIA_SMI)
    medium_sft.set_profile(setup=[found_first, "export MARK=here"])
    driver, row = medium_sft.start_training()

    def said(*words: str, status: int = 0) -> str:
        done = medium_sft.run("lockstep", *words, check=False)
        assert done.returncode == status, done.stdout
        return str(done.stdout)

    try:
        asked = ("--", "sh", "-c", 'echo "$SLURM_JOB_ID $PWD $MARK"')
        assert said("shell", "sft", *asked) == f"{row['job']} {medium_sft.root} here\n"
        assert said("shell", "sft", "--outside", *asked).split()[2:] == []
        said("shell", "sft", "--", "sh", "-c", "exit 3", status=3)
        other = said("shell", "sft", "--job", "99", status=2)
        assert f"sft has no running job 99; it has {row['job']}" in other
        unknown = said("shell", "rollout@iter_001", status=2)
        assert "no job of 'rollout@iter_001' is known here" in unknown

        (used,) = json.loads(said("top", "--json"))
        assert (used["stage"], used["job"]) == ("sft", row["job"])
        assert used["processes"] >= 1
        assert used["memory_bytes"] > 1 << 20
        first, second = used["gpus"]
        assert first["busy_percent"] == 87
        assert first["memory_bytes"] == 70 << 30
        assert second["busy_percent"] is None
        assert "0 NVIDIA H200  87 %  70.0 GiB of 140.4 GiB" in said("top")
    finally:
        medium_sft.release()
        succeeded(driver)
    assert "no job of sft runs on Slurm now" in said("shell", "sft", status=2)
    assert said("top") == "no job of this clone runs on Slurm\n"


def test_flags_of_srun_reach_it_as_they_were_written(cluster: Any, tmp_path: Path) -> None:
    """Pyxis is not here: a stand-in takes its flags from srun, as the plugin would."""
    srun = f"""#!/bin/bash
for word; do
  shift
  case $word in --container-*) echo "$word" >> {tmp_path}/flags ;; *) set -- "$@" "$word" ;; esac
done
PATH=${{PATH#*:}} exec srun "$@"
"""
    flags = ["--container-image=registry#team/image:1", "--container-mounts=/a b:/c"]
    resources = Resources(
        partition="cpu",
        memory="100M",
        setup=[stand_in(tmp_path / "bin", "srun", srun)],
        srun=flags,
        container="sh -c 'echo worked' --",
    )
    batch = Batch("rollout", tmp_path / "attempt", resources, "token", tmp_path, tmp_path)
    batch.folder.mkdir()
    (tmp_path / "job.sh").write_text(batch_script(batch))
    job = cluster.run("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
    until(lambda: not cluster.run("squeue", "-h", "-j", job), "its end")
    (log,) = batch.folder.glob("*_log.out")
    assert log.read_text() == "worked\n"
    assert (tmp_path / "flags").read_text().splitlines() == flags
