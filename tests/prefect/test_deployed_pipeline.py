"""The pipeline's graph as a deployment: real jobs, real servers, stages that compute little."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prefect_servers import ASK_S, LocalServers, serving

from pipelines.ledger.entry import Ledger
from pipelines.ledger.state import State
from pipelines.servers import servers
from tests.conftest import TINY, Clone, copy_tree
from tests.pipeline.test_session import EMPTY_STAGE
from tests.slurm.conftest import _why_not, cluster, on_slurm
from tests.slurm.light_stages import COUNTING_STAGE
from tests.waiting import TIMEOUT_S, until

__all__ = ["cluster"]

pytestmark = pytest.mark.slow
_reason = _why_not()

LIGHT = {"prepare": EMPTY_STAGE, "reward_model": EMPTY_STAGE, "evaluate": EMPTY_STAGE}
LONG = 20_000


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Clone, LocalServers]]:
    """A clone whose SFT counts and whose other stages write nothing worth reading, and its servers.

    Where there is Slurm, its flow runs know of a cluster.
    """
    clone = copy_tree(tmp_path_factory.mktemp("deployed") / "clone")
    clone.set_params(**TINY)
    for name, code in {**LIGHT, "sft": COUNTING_STAGE}.items():
        clone.write_code(f"stages/{name}.py", code)
    clone.commit("light")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCKSTEP_TRACKING")
        # A process that is ready would have to import the code of this clone anew.
        patch.setenv("LOCKSTEP_WARM", "off")
        if not _reason:
            for name, value in request.getfixturevalue("cluster").environment.items():
                patch.setenv(name, value)
        with serving(clone.root) as local:
            yield clone, local
    clone.kill_all()


def mlflow_runs(local: LocalServers) -> list[dict[str, Any]]:
    """Every run that MLflow's server shows."""
    address = servers.running(local.repository)["mlflow"].url + "/api/2.0/mlflow"
    settings = {"auth": ("lockstep", local.password), "verify": False, "timeout": TIMEOUT_S}
    with httpx.Client(**settings) as client:
        found = client.get(f"{address}/experiments/search?max_results=100").raise_for_status()
        ids = [one["experiment_id"] for one in found.json()["experiments"]]
        runs = client.post(f"{address}/runs/search", json={"experiment_ids": ids})
        return runs.raise_for_status().json().get("runs", [])


def test_a_deployed_pipeline_runs_and_its_cancellation_ends_the_jobs(
    served: tuple[Clone, LocalServers],
) -> None:
    counting, local = served
    run = local.start_run("weekday-baseline")
    state = local.ended(run)
    assert state["type"] == "COMPLETED", state["message"]
    wanted = {"prepare", "sft", "reward_model", "evaluate_sft"}
    local.until_tasks(run, dict.fromkeys(wanted, "Completed"))
    assert "are up to date" in counting.run("dvc", "status", *wanted).stdout

    # One run for the flow run and one for each of its stages, all of them closed.
    def all_closed() -> bool:
        time.sleep(ASK_S)
        return [run["info"]["status"] for run in mlflow_runs(local)] == ["FINISHED"] * 5

    until(all_closed, "five closed runs in MLflow")

    counting.set_params(sft__epochs=LONG)
    run = local.start_run("weekday-baseline")
    ledger = Ledger(local.repository.jobs)
    local.until(
        lambda: len(list((ledger.folder / "sft").glob("*/progress.json"))) == 2,
        "its job learns",
        run,
    )
    assert ledger.latest("sft")["sft"].state() is State.RUNNING
    local.cancel(run)
    assert local.ended(run)["type"] == "CANCELLED"
    assert ledger.latest("sft")["sft"].state() is State.CANCELLED
    lines = [" ".join(words) for words in counting.command_lines().values()]
    assert [line for line in lines if "pipelines.worker.worker" in line] == []


@pytest.mark.slurm
@pytest.mark.skipif(_reason is not None, reason=str(_reason))
def test_cancelling_a_flow_run_ends_its_job_on_a_cluster(
    served: tuple[Clone, LocalServers], cluster: Any
) -> None:
    clone, local = on_slurm(served[0].root, cluster), served[1]
    clone.set_params(sft__epochs=LONG + 1)
    run = local.start_run("weekday-baseline", profile="slurm-dev", targets=["sft"])
    row = clone.training()
    assert row["job"] in clone.jobs()
    local.cancel(run)
    assert local.ended(run)["type"] == "CANCELLED"
    clone.until(lambda: row["job"] not in clone.jobs(), "its job's end")
    assert clone.status()["state"] == "cancelled"
