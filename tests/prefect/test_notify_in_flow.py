"""`notify` of a profile under Prefect: once for a stage, however often the flow retries it."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect_servers import LocalServers
from tiny_project import TinyProject

from pipelines.base.console import Console
from pipelines.base.repository import Repository
from pipelines.runs import flow
from pipelines.runs.flow import pipeline
from pipelines.servers import prefect_api, servers
from pipelines.servers.automations import DEPLOYMENT, NAME, OF_STAGES
from pipelines.tracking.notify import notifier_process, run_notifier
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a real HTTP server, and what it was sent."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", got
        server.shutdown()


def test_what_a_flow_retries_is_told_once_and_only_if_it_was_in_vain(
    project: TinyProject,
    hook: tuple[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, got = hook
    monkeypatch.setattr(flow, "RETRY_DELAYS_S", [0.1, 0.1])
    profile = project.root / "slurm_profiles/local.yaml"
    profile.write_text(f"{profile.read_text()}notify: {{webhook: '{address}'}}\n")
    failed = {"retryable": True, "error": "OSError: no space"}
    project.behave(
        a={"failures": 1, "ledger": None},
        b={"failures": 9, "ledger": failed},
        c={"failures": 9, "ledger": None},
    )
    assert pipeline(return_state=True).is_failed()
    until(lambda: len(got) > 1, "somebody is told of both")
    repository = Repository(project.root)
    until(lambda: not notifier_process(repository).is_running(), "the notifier has nothing left")
    run_notifier(repository, 5.0)
    told = sorted((each["stage"], each["event"], each["attempts"]) for each in got)
    assert told == [("b", "failed", 3), ("c", "failed", 3)]


def test_what_no_stage_can_tell_of_a_flow_run_prefect_has_told(
    local_servers: LocalServers, served_project: TinyProject, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    address, got = hook
    root = served_project.root
    profile, params = root / "slurm_profiles/local.yaml", root / "params.yaml"
    before = profile.read_text(), params.read_text()

    def automations() -> list[dict[str, Any]]:
        servers.up(local_servers.repository, Console(io.StringIO()))
        return prefect_api.automations(local_servers.api, NAME)

    assert automations() == []
    profile.write_text(f"{before[0]}notify: {{webhook: '{address}'}}\n")
    try:
        [made] = automations()
        [again] = automations()
        assert (again["id"], again["enabled"]) == (made["id"], True)
        params.write_text("sed: 17\n")
        failed = local_servers.ended(local_servers.start_run("nightly"))
        assert failed["type"] == "FAILED"
        local_servers.until(lambda: got, "somebody is told")
        [told] = got
        assert told["text"].startswith("flow run ")
        assert "unknown key `sed`" in told["error"]
        assert (told["event"], told["state"], told["stage"]) == ("failed", "failed", None)

        # That a stage failed, the stage itself tells: of such a run nothing is started.
        params.write_text(before[1])
        served_project.behave(a={"failures": 9})
        run = local_servers.ended(local_servers.start_run("weekday-baseline", targets=["a"]))
        assert run["message"].startswith(OF_STAGES)
    finally:
        profile.write_text(before[0])
        params.write_text(before[1])
    assert automations() == []
    alerts = {"deployments": {"name": {"any_": [DEPLOYMENT]}}}
    assert len(local_servers.post("/flow_runs/filter", alerts)) == 1
