"""`notify` of a profile under Prefect: once for a stage, however often the flow retries it."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tiny_project import TinyProject

from pipelines.base.repository import Repository
from pipelines.runs import flow
from pipelines.runs.flow import pipeline
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
    failed = {"retryable": True, "error": "OSError: no space", "ended": time.time()}
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
