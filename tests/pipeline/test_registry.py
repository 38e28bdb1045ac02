"""Policies in MLflow's model registry: their lineage, their files, and each of them once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlflow
import pytest
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.base.errors import LockstepError
from pipelines.commands.cli import main
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.export import registry
from tests.ports import free_port
from tests.waiting import answers, until

NAME = "lockstep"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a real server on loopback, with an empty store of its own."""
    port = free_port()
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = [f"sqlite:///{tmp_path / 'server.db'}"]
    places += ["--artifacts-destination", str(tmp_path / "server-artifacts")]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, "--backend-store-uri", *places],
        cwd=tmp_path,
        env={**os.environ, **settings},
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/health"), "the MLflow server is up", at_work=process)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """mlflow keeps an address that it was told for the whole process, and tells the environment."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield
    mlflow.set_tracking_uri(None)
    if before is not None:
        os.environ["MLFLOW_TRACKING_URI"] = before


def recorded(root: Path, stage: str, path: str) -> str:
    outs = read_stages(root)[stage]["outs"]
    return str(next(out["md5"] for out in outs if out["path"] == path))


def policy_hash(root: Path, policy: str) -> str:
    stage = policy if policy == "sft" else f"policy_update@{policy}"
    return recorded(root, stage, f"artifacts/policies/{policy}/model")


def check_loads(uri: str, policy: Path, tmp_path: Path) -> None:
    """Through the registry's own address, with nothing but MLflow and transformers."""
    folder = mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(policy)
    assert all(
        (a == b).all() for a, b in zip(loaded.parameters(), expected.parameters(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (Path(folder) / "README.md").read_text().startswith("---\n")


def test_a_finished_pipeline_has_registered_its_last_policy(finished: Any) -> None:
    client = MlflowClient(f"sqlite:///{finished.root}/.lockstep/mlflow.db")
    stages = read_stages(finished.root)
    last = max(stage.partition("@")[2] for stage in stages if stage.startswith("policy_update@"))
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert version.tags["lockstep.policy"] == last
    assert version.tags["lockstep.dvc_hash"] == policy_hash(finished.root, last)
    assert version.tags["lockstep.parents"].startswith("sft")
    assert client.get_model_version_by_alias(NAME, last).version == version.version
    assert "was already version 1" in finished.run("lockstep", "register", last).stdout


@dataclass
class Register:
    """`lockstep register` in a clone, in this process, which has MLflow imported."""

    capsys: pytest.CaptureFixture[str]
    clone: Any

    def __call__(self, *words: str, **extra: str) -> tuple[int, str]:
        environment = {**self.clone.environment, **extra}
        self.capsys.readouterr()
        with mock.patch.dict(os.environ, environment, clear=True), chdir(self.clone.root):
            status = main(["register", *words])
        return status, "".join(self.capsys.readouterr())


@pytest.fixture
def register(finished: Any, capsys: pytest.CaptureFixture[str]) -> Register:
    return Register(capsys, finished)


def test_a_policy_is_registered_once_with_its_lineage_and_loads_by_its_alias(
    finished: Any, register: Register, tmp_path: Path
) -> None:
    status, said = register("sft", "--alias", "champion")
    assert (status, "is version 2" in said) == (0, True), said
    status, said = register("sft", "--alias", "champion")
    assert (status, "was already version 2" in said) == (0, True), said
    store = f"sqlite:///{finished.root}/.lockstep/mlflow.db"
    client = MlflowClient(store)
    assert len(client.search_model_versions(f"name = '{NAME}'")) == 2
    version = client.get_model_version_by_alias(NAME, "champion")
    assert client.get_model_version_by_alias(NAME, "sft").version == version.version
    digest = policy_hash(finished.root, "sft")
    assert version.tags["lockstep.dvc_hash"] == digest
    run = client.get_run(version.run_id)
    assert run.data.tags["lockstep.address"] == "sft"
    assert run.data.tags["lockstep.out.artifacts/policies/sft/model"] == digest
    runs = dict(item.split("=") for item in version.tags["lockstep.runs"].split())
    before = client.get_run(runs["prepare"])
    assert len(version.tags) < 16  # what a page of the registry shows
    assert before.data.tags["lockstep.stage"] == "prepare"
    assert "## Metrics" in version.description

    policy = finished.root / "artifacts/policies/sft/model"
    mlflow.set_tracking_uri(store)
    check_loads(f"models:/{NAME}@champion", policy, tmp_path)
    kept = Path(version.source) / "model.safetensors"
    assert kept.stat().st_ino == (policy / "model.safetensors").stat().st_ino, "not a copy"


def test_a_server_elsewhere_is_sent_the_folder(
    finished: Any, register: Register, server: str, tmp_path: Path
) -> None:
    finished.variables["MLFLOW_TRACKING_URI"] = server
    finished.run("lockstep", "register", "sft", "--name", "mine", "--alias", "champion")
    assert register("sft", "--name", "mine")[0] == 0
    client = MlflowClient(server)
    (version,) = client.search_model_versions("name = 'mine'")
    assert version.tags["lockstep.dvc_hash"] == policy_hash(finished.root, "sft")
    assert client.get_run(version.run_id).data.tags["lockstep.address"] == "sft"
    mlflow.set_tracking_uri(server)
    check_loads("models:/mine@champion", finished.root / "artifacts/policies/sft/model", tmp_path)


def test_a_policy_that_cannot_be_registered_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def put(_store: Any, _repository: Any, policy: str, **_: Any) -> Any:
        if policy == "large":
            raise LockstepError("it has 3.0 GiB")
        return SimpleNamespace(text=f"{policy} is version 1")

    monkeypatch.setattr(registry, "last_policies", lambda _: ["large", "small"])
    monkeypatch.setattr(registry, "find_policy", lambda _, policy: policy)
    monkeypatch.setattr(registry, "register_version", put)
    assert [each.text for each in registry.register_last(None, None)] == ["small is version 1"]
    assert "large is not registered: LockstepError: it has 3.0 GiB" in capsys.readouterr().out
    monkeypatch.setattr(registry, "last_policies", lambda _: 1 / 0)
    assert registry.register_last(None, None) == []
    assert "the policies are not registered: ZeroDivisionError" in capsys.readouterr().out


def test_what_stands_in_the_way_is_said(finished: Any, register: Register) -> None:
    finished.variables["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    status, said = register("sft")
    assert status == 2
    assert "MLflow at http://127.0.0.1:9 did not register sft" in said
    next(finished.root.glob(".lockstep/jobs/sft/*/tracking.json")).unlink()
    status, said = register("sft")
    assert status == 2
    assert "did not register sft: the run that produced it is not there yet" in said
    off = finished.run("lockstep", "register", "sft", check=False, LOCKSTEP_TRACKING="off")
    assert off.returncode == 2
    assert "LOCKSTEP_TRACKING is off" in off.stdout
    status, said = register("iter_009")
    assert status == 2
    assert "iter_009" in said
