"""The few requests that `lockstep up` and `down` make to a Prefect server on this machine.

Over plain HTTP: importing Prefect's own client takes seconds.
"""

import time
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from pipelines.base.errors import LockstepError

WORK_POOL = "lockstep"
BUSY_TRIES = 20
BUSY_PAUSE_S = 1.0

# Loopback is never reached through a proxy, whatever the environment says.
_client = httpx.Client(trust_env=False)


@dataclass(frozen=True)
class Api:
    """The address of Prefect's server, and its password."""

    url: str
    password: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Basic {b64encode(self.password.encode()).decode()}"}


def answers(url: str) -> bool:
    """Whether a server answers with status 200."""
    try:
        return _client.get(url, timeout=5, follow_redirects=True).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def make_work_pool(api: Api) -> None:
    """Make sure that the work pool exists."""
    pool = {"name": WORK_POOL, "type": "process"}
    _post(api, "/work_pools/", pool, accept=httpx.codes.CONFLICT)


def worker_is_online(api: Api) -> bool:
    workers = _post(api, f"/work_pools/{WORK_POOL}/workers/filter", {})
    return any(worker["status"] == "ONLINE" for worker in workers)


def deployments(api: Api) -> list[dict[str, Any]]:
    return list(_post(api, "/deployments/filter", {}))


def automations(api: Api, name: str) -> list[dict[str, Any]]:
    """Those of that name."""
    return list(_post(api, "/automations/filter", {"automations": {"name": {"any_": [name]}}}))


def create_automation(api: Api, automation: dict[str, Any]) -> None:
    _post(api, "/automations/", automation)


def replace_automation(api: Api, identity: str, automation: dict[str, Any]) -> None:
    _ask(api, "PUT", f"/automations/{identity}", automation)


def delete_automation(api: Api, identity: str) -> None:
    _ask(api, "DELETE", f"/automations/{identity}", None)


def set_schedules(api: Api, *, active: bool) -> None:
    """Restart all schedules, or stop them."""
    for deployment in deployments(api):
        # Pausing drops the runs that were due while nothing ran: they would all start now.
        _post(api, f"/deployments/{deployment['id']}/pause_deployment", {})
        if active:
            _post(api, f"/deployments/{deployment['id']}/resume_deployment", {})


def open_flow_runs(api: Api) -> list[dict[str, Any]]:
    """Flow runs of the pool that a worker has started and that have not ended."""
    types = {"any_": ["PENDING", "RUNNING", "CANCELLING"]}
    pools = {"name": {"any_": [WORK_POOL]}}
    query = {"flow_runs": {"state": {"type": types}}, "work_pools": pools}
    return list(_post(api, "/flow_runs/filter", query))


def cancel_flow_run(api: Api, run: str) -> None:
    """Request the cancellation of a run; its worker carries it out."""
    state = {"type": "CANCELLING", "name": "Cancelling"}
    _post(api, f"/flow_runs/{run}/set_state", {"state": state})


def close_lost_flow_runs(api: Api) -> None:
    """Mark as crashed the runs whose process was killed together with its worker."""
    for run in open_flow_runs(api):
        if not _is_flow_process(run["infrastructure_pid"]):
            state = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
            _post(api, f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _is_flow_process(pid: str | None) -> bool:
    try:
        return "prefect.engine" in psutil.Process(int(pid or "")).cmdline()
    except (ValueError, psutil.Error):
        return False


def _post(api: Api, path: str, body: Any, *, accept: int | None = None) -> Any:
    return _ask(api, "POST", path, body, accept=accept)


def _ask(api: Api, method: str, path: str, body: Any, *, accept: int | None = None) -> Any:
    """What the server answers; `accept`: a status besides success that is no error."""
    for _ in range(BUSY_TRIES):
        try:
            answer = _client.request(
                method, api.url + path, json=body, headers=api.headers, timeout=30
            )
        except httpx.HTTPError as error:
            raise LockstepError(f"Prefect at {api.url} does not answer: {error}") from error
        # The server's answer while another process writes to its database.
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(BUSY_PAUSE_S)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise LockstepError(
            f"Prefect at {api.url} was started with a different password than the clone has "
            "now: run `lockstep down`, then `lockstep up`"
        )
    if answer.is_error and answer.status_code != accept:
        raise LockstepError(f"Prefect at {api.url}{path} answers {answer.status_code}")
    return answer.json() if answer.content else None
