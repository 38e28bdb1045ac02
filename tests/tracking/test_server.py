"""A real MLflow server on loopback: down, up, and with a password in its address."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from fake_clone import FakeClone
from fake_policy import write_policy

from pipelines.export.registry import register_version
from pipelines.tracking.cursor import unshipped
from pipelines.tracking.rounds import ship_all
from pipelines.tracking.shipper import problem
from pipelines.tracking.store import Store
from tests.ports import free_port
from tests.waiting import TIMEOUT_S, answers, until

# As `mlflow server` has it run, without the process above it that imports as much again.
SERVER = """
import os, sys
import uvicorn
from mlflow.server import constants
port, store, artifacts = sys.argv[1:]
os.environ |= {
    constants.BACKEND_STORE_URI_ENV_VAR: store,
    constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
    constants.ARTIFACTS_DESTINATION_ENV_VAR: artifacts,
    constants.SERVE_ARTIFACTS_ENV_VAR: "true",
}
uvicorn.run("mlflow.server.fastapi_app:app", host="127.0.0.1", port=int(port))
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start_server(
    tmp_path: Path, migrated_database: Path, port: int
) -> Iterator[Callable[[], None]]:
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        store = tmp_path / "server.db"
        store.write_bytes(migrated_database.read_bytes())
        words = [str(port), f"sqlite:///{store}", str(tmp_path / "artifacts")]
        servers.append(
            subprocess.Popen(
                [sys.executable, "-c", SERVER, *words],
                cwd=tmp_path,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                start_new_session=True,
            )
        )
        until(
            lambda: answers(f"http://127.0.0.1:{port}/health"),
            "the MLflow server is up",
            at_work=servers[-1],
        )

    yield start
    for server in servers:
        os.killpg(server.pid, 15)
        server.wait()


def test_what_a_server_missed_is_shipped_when_it_is_back(
    clone: FakeClone,
    port: int,
    start_server: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:pa55word@127.0.0.1:{port}")
    entry = clone.run("rollout@iter_001")
    waiting = ship_all(clone.repository, TIMEOUT_S)
    assert waiting == [entry] == unshipped(clone.repository)
    said = problem(clone.repository)
    assert said is not None
    assert f"127.0.0.1:{port} does not answer" in said
    assert "1 stage wait" in said
    assert "pa55word" not in said
    clone.kill_shipper()
    start_server()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    assert ship_all(clone.repository, TIMEOUT_S) == []
    assert problem(clone.repository) is None
    run = clone.run_of("rollout@iter_001")
    assert run.info.status == "FINISHED"
    assert clone.steps(run, "step/loss") == [1, 2, 3]
    assert run.inputs.dataset_inputs
    files = {item.path for item in clone.client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "logs", "record.json", "spec.json"}
    place = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (
        clone.cursor(entry)["url"]
        == f"http://127.0.0.1:{port}/#/{place}?workflowType=machine_learning"
    )
    for path in clone.repository.home.rglob("*"):
        assert not path.is_file() or b"pa55word" not in path.read_bytes(), path


def test_another_address_takes_over_at_once(
    clone: FakeClone, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    clone.run("sft")
    assert ship_all(clone.repository, TIMEOUT_S)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert ship_all(clone.repository, TIMEOUT_S) == []
    assert clone.run_of("sft").info.status == "FINISHED"


def test_an_evaluation_that_comes_later_is_sent_to_the_registered_policy(
    clone: FakeClone,
    start_server: Callable[[], None],
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    start_server()
    found = write_policy(clone.root / "policy")
    register_version(Store(clone.repository), clone.repository, found)
    known = replace(found, evaluation={"accuracy": 0.5})
    version = register_version(Store(clone.repository), clone.repository, known).version
    tags = clone.client.get_model_version("lockstep", version).tags
    assert tags["lockstep.metric.accuracy"] == "0.5"
    folder = mlflow.artifacts.download_artifacts(
        f"models:/lockstep/{version}", dst_path=str(tmp_path / "got"), tracking_uri=address
    )
    assert "| accuracy | 0.5 |" in (Path(folder) / "README.md").read_text()
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert weights == (clone.root / "policy/model.safetensors").read_bytes()
