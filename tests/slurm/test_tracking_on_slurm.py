"""MLflow sees a job that Slurm restarts as one run. Prefect: prefect/test_deployed_pipeline.py."""

import sqlite3
from typing import Any

import pytest

from tests.waiting import succeeded

pytestmark = pytest.mark.slow

SAVED = ".lockstep/jobs/sft/*/scratch/checkpoint-*"


def test_a_requeued_job_is_one_run_with_each_step_once(medium_sft: Any) -> None:
    del medium_sft.variables["LOCKSTEP_TRACKING"]
    medium_sft.set_profile(checkpoint_seconds=600)
    driver, row = medium_sft.start_training("lockstep", "run", "sft")
    medium_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    medium_sft.until(lambda: list(medium_sft.root.glob(SAVED)), "saved on the warning")
    medium_sft.release()
    succeeded(driver)
    assert medium_sft.status()["restarts"] == 1
    medium_sft.run("lockstep", "sync")
    with sqlite3.connect(medium_sft.root / ".lockstep/mlflow.db") as database:
        runs = database.execute(
            "select run_uuid from tags where key = 'lockstep.stage' and value = 'sft'"
        ).fetchall()
        assert len(runs) == 1
        steps = database.execute(
            "select step from metrics where run_uuid = ? and key = 'step/loss'", runs[0]
        ).fetchall()
    logged = [step for (step,) in steps if step]
    assert sorted(logged) == medium_sft.steps()
