"""The Run page beside a real queue: what it shows of a job there, and that its buttons reach it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipelines.base.repository import Repository
from pipelines.ui.app import create_app
from pipelines.ui.clone import open_clone


@pytest.fixture
def page(long_sft: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """What the page asks its server, whose commands go to the cluster."""
    for name, value in long_sft.environment.items():
        monkeypatch.setenv(name, value)
    clone = open_clone(Repository(long_sft.root))
    headers = {"X-Lockstep-Token": clone.token}
    with TestClient(create_app(clone), base_url="http://127.0.0.1", headers=headers) as client:
        yield client


def row(page: TestClient) -> dict[str, Any]:
    rows = page.get("/api/run/stages").json()["stages"]
    return next(row for row in rows if row["stage"] == "sft")


def ask(page: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = page.post(f"/api/run/{path}", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_a_stage_in_the_queue_is_shown_run_and_cancelled(long_sft: Any, page: TestClient) -> None:
    cluster, began = long_sft.cluster, time.time()
    cluster.run("scontrol", "update", "PartitionName=cpu", "State=DOWN")
    try:
        ask(page, "start", {"target": "sft", "profile": "slurm-dev"})
        queued = long_sft.until(lambda: (r := row(page))["state"] == "queued" and r, "queued")
        long_sft.until(lambda: row(page)["reason"] == "PartitionDown", "the reason")
        assert queued["job"] in cluster.run("squeue", "-h", "-o", "%i").split()
        assert began <= queued["since"] <= time.time()
        given = page.get("/api/run/stage", params={"stage": "sft"}).json()["resources"]
        assert (given["given"], given["profile"], given["partition"]) == (True, "slurm-dev", "cpu")
    finally:
        cluster.run("scontrol", "update", "PartitionName=cpu", "State=UP")

    running = long_sft.until(lambda: (r := row(page))["progress"] and r, "its progress")
    assert (running["state"], running["job"]) == ("running", queued["job"])
    assert running["where"] == cluster.run("squeue", "-h", "-o", "%N").strip()
    assert running["limit"] == 30 * 60
    assert running["reason"] == ""

    def shown() -> dict[str, Any] | None:
        found = page.get("/api/run/stage", params={"stage": "sft"}).json()
        return found if found["logs"] and found["curves"] else None

    stage = long_sft.until(shown, "its log and its curves")
    assert [curve["name"] for curve in stage["curves"]] == ["loss"]

    ask(page, "cancel", {"stage": "sft"})
    long_sft.until(lambda: row(page)["state"] == "cancelled", "cancelled")
    long_sft.until(lambda: not long_sft.jobs(), "an empty queue")
