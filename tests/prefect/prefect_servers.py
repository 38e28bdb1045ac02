"""MLflow and Prefect as `lockstep up` starts them, and short names for what tests ask Prefect."""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx

from pipelines.base.console import Console
from pipelines.base.repository import Repository
from pipelines.servers import servers
from pipelines.servers.password import password_of
from pipelines.servers.prefect_api import Api
from tests.ports import free_port
from tests.waiting import TIMEOUT_S, until

T = TypeVar("T")
ASK_S = 0.5
"""Between two questions to a server: each costs it time that others need."""


@dataclass(frozen=True)
class LocalServers:
    """What `lockstep up` started in a clone, and what it said."""

    repository: Repository
    said: str

    @property
    def api(self) -> Api:
        return Api(servers.running(self.repository)["prefect"].api, self.password)

    @property
    def password(self) -> str:
        return password_of(self.repository)

    def get(self, path: str) -> Any:
        return self._request("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self._request("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._request("DELETE", path)

    def deployment(self, name: str) -> dict[str, Any]:
        return self.get(f"/deployments/name/lockstep/{name}")

    def start_run(self, deployment: str, **parameters: Any) -> str:
        identity = self.deployment(deployment)["id"]
        body = {"parameters": parameters}
        return self.post(f"/deployments/{identity}/create_flow_run", body)["id"]

    def state(self, run: str) -> dict[str, Any]:
        return self.get(f"/flow_runs/{run}")["state"]

    def has_ended(self, run: str) -> bool:
        return self.state(run)["type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

    def ended(self, run: str) -> dict[str, Any]:
        """The run's last state, waited for."""
        self.until(lambda: self.has_ended(run), f"the end of flow run {run}")
        return self.state(run)

    def until(self, condition: Callable[[], Any], what: str, run: str | None = None) -> Any:
        """Wait for what a flow run brings about; it needs the worker, and not to have ended."""

        def at_work() -> bool:
            alive = "worker" in servers.running(self.repository)
            return alive and not (run and self.has_ended(run))

        said = lambda: f"; {self.state(run)['message']}\n{self.logs(run)}" if run else ""  # noqa: E731
        return until(condition, what, said, pause_s=ASK_S, at_work=at_work)

    def task_runs(self, run: str) -> dict[str, dict[str, Any]]:
        body = {"flow_runs": {"id": {"any_": [run]}}}
        return {found["name"]: found for found in self.post("/task_runs/filter", body)}

    def task_states(self, run: str) -> dict[str, str]:
        return {name: found["state"]["name"] for name, found in self.task_runs(run).items()}

    def until_tasks(self, run: str, states: dict[str, str]) -> dict[str, dict[str, Any]]:
        """The task runs, once they are in these states: word of them comes after the flow's end."""
        _until_sent(lambda: self.task_states(run), states.__eq__, f"{states} in flow run {run}")
        return self.task_runs(run)

    def until_logged(self, run: str, line: str) -> str:
        """What was logged, once the line is among it: logs are sent in batches."""
        what = f"{line!r} in the logs of flow run {run}"
        return _until_sent(lambda: self.logs(run), lambda logs: line in logs, what)

    def cancel(self, run: str) -> None:
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.post(f"/flow_runs/{run}/set_state", {"state": state})

    def logs(self, run: str) -> str:
        return "\n".join(line["message"] for line in self._log_lines(run))

    def errors(self, run: str) -> list[str]:
        return [line["message"] for line in self._log_lines(run) if line["level"] >= logging.ERROR]

    def _log_lines(self, run: str) -> list[dict[str, Any]]:
        body = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
        return list(self.post("/logs/filter", body))

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        url, headers = self.api.url + path, self.api.headers
        for _ in range(30):
            answer = _client().request(method, url, json=body, headers=headers)
            # On a busy machine: another writer has the database.
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            time.sleep(1)
        raise AssertionError(f"{path}: the server stays busy")


@cache
def _client() -> httpx.Client:
    """One for all questions: each new one would read the certificates of the whole world first."""
    one_each = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(verify=False, limits=one_each, timeout=TIMEOUT_S)


def _until_sent(get: Callable[[], T], is_right: Callable[[T], bool], what: str) -> T:
    send_what_waits()
    until(lambda: is_right(get()), what, otherwise=lambda: f", but {get()}", pause_s=ASK_S)
    return get()


@contextmanager
def serving(root: Path) -> Iterator[LocalServers]:
    repository = Repository(root)
    said = io.StringIO()
    servers.up(repository, Console(said), free_port(), free_port(), free_port())
    try:
        yield LocalServers(repository, said.getvalue())
    finally:
        servers.down(repository, Console(io.StringIO()))


def send_what_waits() -> None:
    """Prefect's client sends in the background, and tries for a minute once the server is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all()
    APILogWorker.drain_all()
