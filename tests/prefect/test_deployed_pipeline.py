"""The pipeline itself, small, as a deployment: real stages, real jobs, real servers."""

import time
from typing import Any

import httpx
import pytest
from prefect_servers import ASK_S, LocalServers, serving

from pipelines.ledger.entry import Ledger
from pipelines.ledger.state import State
from pipelines.servers import servers
from tests.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.slow

BESIDE_SFT = "prepare,reward_model,evaluate_sft"


def mlflow_runs(local: LocalServers) -> list[dict[str, Any]]:
    """Every run that MLflow's server shows."""
    address = servers.running(local.repository)["mlflow"].url + "/api/2.0/mlflow"
    with httpx.Client(auth=("lockstep", local.password), timeout=TIMEOUT_S) as client:
        found = client.get(f"{address}/experiments/search?max_results=100").raise_for_status()
        ids = [one["experiment_id"] for one in found.json()["experiments"]]
        runs = client.post(f"{address}/runs/search", json={"experiment_ids": ids})
        return runs.raise_for_status().json().get("runs", [])


def test_a_deployed_pipeline_runs_and_its_cancellation_ends_the_jobs(
    tiny_clone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_TRACKING")
    # The stages that nobody cancels need no jobs of their own.
    with serving(tiny_clone.root) as local, tiny_clone.session(BESIDE_SFT):
        run = local.start_run("weekday-baseline")
        state = local.ended(run)
        assert state["type"] == "COMPLETED", state["message"]
        wanted = {"prepare", "sft", "reward_model", "evaluate_sft"}
        local.until_tasks(run, dict.fromkeys(wanted, "Completed"))
        assert "are up to date" in tiny_clone.run("dvc", "status", *wanted).stdout

        # One run for the flow run and one for each of its stages, all of them closed.
        def all_closed() -> bool:
            time.sleep(ASK_S)
            return [run["info"]["status"] for run in mlflow_runs(local)] == ["FINISHED"] * 5

        until(all_closed, "five closed runs in MLflow")

        tiny_clone.set_params(sft__epochs=5000)
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
        lines = [" ".join(words) for words in tiny_clone.command_lines().values()]
        assert [line for line in lines if "pipelines.worker.worker" in line] == []
