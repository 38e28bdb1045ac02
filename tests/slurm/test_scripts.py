"""What the batch script does around the worker, which a few lines of shell stand in for."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.profiles import Resources
from pipelines.slurm.script import Batch, batch_script
from tests.waiting import until


@pytest.fixture
def submit(cluster: Any, tmp_path: Path) -> Any:
    """Submits a script whose worker is these lines, and waits for its end: states by job."""

    def run(folder: Path, worker: str, **options: Any) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "worker.sh").write_text(worker)
        resources = Resources(
            partition="cpu", memory="100M", container=f"sh {tmp_path / 'worker.sh'}"
        )
        batch = Batch("rollout", folder, resources, "token", tmp_path, tmp_path, **options)
        (tmp_path / "job.sh").write_text(batch_script(batch))
        job = cluster.run("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
        until(lambda: not cluster.run("squeue", "-h", "-j", job), "its end")
        show = ("squeue", "-h", "--array", "--states=all", "-o", "%i %T", "-j", job)
        rows = (row.split() for row in cluster.run(*show).splitlines())
        return {name.removeprefix(job): state for name, state in rows}

    return run


@pytest.mark.parametrize("shards", [None, [0, 1]])
def test_logs_lie_where_they_are_looked_for_whatever_the_path(
    submit: Any, tmp_path: Path, shards: list[int] | None
) -> None:
    folder = tmp_path / "of %j, 50%"
    submit(folder, "echo hello\n", shards=shards, parallelism=2)
    logs = sorted(folder.glob("*_log.out"))
    assert [path.read_text() for path in logs] == ["hello\n"] * len(shards or [0])
    assert [path.name.partition("_")[2] for path in logs] == (
        ["0_0_log.out", "1_0_log.out"] if shards else ["0_log.out"]
    )
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path != folder]


def test_a_shard_that_fails_ends_the_others_though_nobody_waits(
    submit: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "attempt"
    worker = f"""
    if [ "$SLURM_ARRAY_TASK_ID" = 1 ]; then
      mkdir {folder}/tasks && touch {folder}/tasks/FAILED-00001
      exit 1
    fi
    sleep 600
    """
    states = submit(folder, worker, shards=[0, 1, 2], parallelism=2)
    assert states == {"_0": "CANCELLED", "_1": "FAILED", "_2": "CANCELLED"}
    assert any("a shard has failed" in path.read_text() for path in folder.glob("*_1_0_log.err"))


def test_a_shard_that_is_killed_leaves_the_others_their_work(submit: Any, tmp_path: Path) -> None:
    worker = 'if [ "$SLURM_ARRAY_TASK_ID" = 1 ]; then kill -9 $$; fi\nsleep 3\n'
    states = submit(tmp_path / "attempt", worker, shards=[0, 1], parallelism=2)
    assert states == {"_0": "COMPLETED", "_1": "FAILED"}
