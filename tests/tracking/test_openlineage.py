"""What somebody who listens with OpenLineage hears of a clone."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import psutil
import pytest
from fake_clone import DIGEST, FakeClone

from pipelines.base import background
from pipelines.tracking import openlineage
from pipelines.tracking.openlineage import is_configured, run_emitter, start_emitter
from pipelines.tracking.openlineage_client import run_id
from pipelines.tracking.openlineage_events import LastEvent, due
from pipelines.tracking.rounds import ship_all
from tests.conftest import kill_each
from tests.waiting import until

ROOT = Path(__file__).parents[2]
FACETS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "required": ["_producer", "_schemaURL"],
        "properties": {
            "_producer": {"type": "string", "format": "uri"},
            "_schemaURL": {"type": "string", "format": "uri"},
        },
    },
}
DATASETS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["namespace", "name"],
        "properties": {"facets": FACETS, "inputFacets": FACETS, "outputFacets": FACETS},
    },
}
RUN_EVENT = {
    "type": "object",
    "required": ["eventTime", "eventType", "producer", "schemaURL", "run", "job"],
    "properties": {
        "eventTime": {"type": "string", "format": "date-time"},
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "producer": {"type": "string", "format": "uri"},
        "schemaURL": {"type": "string", "format": "uri"},
        "run": {
            "type": "object",
            "required": ["runId"],
            "properties": {"runId": {"type": "string", "format": "uuid"}, "facets": FACETS},
        },
        "job": {
            "type": "object",
            "required": ["namespace", "name"],
            "properties": {"facets": FACETS},
        },
        "inputs": DATASETS,
        "outputs": DATASETS,
    },
}
"""What OpenLineage's own schema requires of a run event."""


class Endpoint:
    """A server that takes events, once it is up."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.answer = 201
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if endpoint.answer == 201:
                    endpoint.events.append(json.loads(body))
                self.send_response(endpoint.answer)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture(autouse=True)
def _short_waits(clone: FakeClone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(clone.root)
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(background, "LINGER_S", 0.0)
    monkeypatch.setattr(background, "INTERVAL_S", 0.05)


@pytest.fixture
def to_file(clone: FakeClone) -> Path:
    """A clone that writes its events to a file, as `openlineage.yml` says."""
    path = clone.root / "events.jsonl"
    settings = {"transport": {"type": "file", "log_file_path": str(path), "append": True}}
    (clone.root / "openlineage.yml").write_text(json.dumps(settings))
    return path


def sent(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _leave_nothing_running(clone: FakeClone) -> Iterator[None]:
    yield
    kill_all(emitters(clone))


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["eventType"] for event in events]


def emit(clone: FakeClone) -> None:
    """What the background process does, in this one."""
    run_emitter(clone.repository, 5.0)


def problem(clone: FakeClone) -> str:
    return openlineage.problem(clone.repository) or ""


def emitters(clone: FakeClone) -> list[psutil.Process]:
    return clone.processes_of("pipelines.tracking.openlineage")


def kill_all(processes: list[psutil.Process]) -> None:
    """And wait until their locks are free."""
    kill_each(processes)
    psutil.wait_procs(processes)


def test_a_stage_is_a_run_with_its_inputs_and_outputs_by_hash(
    clone: FakeClone, to_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "team-a")
    entry = clone.run("rollout@iter_001", {"length": 7.5})
    emit(clone)
    start, complete = sent(to_file)
    assert types([start, complete]) == ["START", "COMPLETE"]
    for event in (start, complete):
        jsonschema.validate(event, RUN_EVENT, format_checker=jsonschema.FormatChecker())
        facet = event["run"]["facets"]["lockstep"]
        jsonschema.validate(facet, json.loads((ROOT / "docs/openlineage.json").read_text()))
        assert facet["fingerprint"] == entry.spec.fingerprint
        assert facet["gitCommit"] == "f00d"
        assert (event["job"]["namespace"], event["job"]["name"]) == ("team-a", "rollout@iter_001")
        assert event["run"]["runId"] == run_id(entry)
        assert event["run"]["facets"]["parent"]["job"]["name"] == "dvc repro"
        params = event["run"]["facets"]["executionParameters"]["parameters"]
        assert {"key": "seed", "value": "17"} in params
        versions = {d["name"]: d["facets"]["version"]["datasetVersion"] for d in event["inputs"]}
        assert versions == {item.path: DIGEST for item in entry.spec.inputs.values()}
        assert {d["name"] for d in event["outputs"]} == set(entry.spec.outs.values())
    record = entry.record
    assert record is not None
    for output in complete["outputs"]:
        assert output["facets"]["version"]["datasetVersion"] == record.outs[output["name"]]
        assert output["outputFacets"]["outputStatistics"]["fileCount"] == 1
    assert complete["run"]["facets"]["lockstep"]["metrics"] == {"length": 7.5}
    assert start["eventTime"] < complete["eventTime"]


def test_what_was_told_is_not_told_again(clone: FakeClone, to_file: Path) -> None:
    clone.run("sft")
    emit(clone)
    emit(clone)
    clone.run("evaluate_sft")
    emit(clone)
    events = sent(to_file)
    names = [event["job"]["name"] for event in events]
    assert names == ["sft", "sft", "evaluate_sft", "evaluate_sft"]
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in events}
    assert len({event["run"]["runId"] for event in events}) == 2
    assert len(parents) == 1
    UUID(parents.pop())


def test_an_entry_that_fails_and_goes_on_is_one_run(clone: FakeClone, to_file: Path) -> None:
    entry = clone.begin("sft")
    clone.end(entry, "failed", error="row 7 of demonstrations.parquet: no prompt")
    with entry.lease():
        # A driver is at work, which may try again: nothing has failed yet.
        assert due(entry, LastEvent("START", 1)) == []
    emit(clone)
    clone.start(entry)
    assert due(entry, LastEvent.of(entry)) == ["RUNNING"]
    clone.finish(entry)
    emit(clone)
    events = sent(to_file)
    assert types(events) == ["START", "FAIL", "RUNNING", "COMPLETE"]
    error = events[1]["run"]["facets"]["errorMessage"]
    assert error["message"] == "row 7 of demonstrations.parquet: no prompt"
    assert "errorMessage" not in events[3]["run"]["facets"]
    assert {event["run"]["runId"] for event in events} == {run_id(entry)}
    assert not any(output.get("facets") for event in events[:3] for output in event["outputs"])


def test_cancelled_is_abort_and_a_dead_job_is_fail(clone: FakeClone, to_file: Path) -> None:
    clone.end(clone.begin("sft"), "cancelled")
    clone.die(clone.begin("reward_model"))
    emit(clone)
    ends = {event["job"]["name"]: event["eventType"] for event in sent(to_file)}
    assert ends == {"sft": "ABORT", "reward_model": "FAIL"}


def test_an_endpoint_that_was_down_gets_everything_once_when_it_is_up(
    clone: FakeClone, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", endpoint.url)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", endpoint.url)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", '{"total": 0}')
    monkeypatch.setattr(background, "GIVE_UP_S", 0.2)
    entry = clone.run("sft")
    emit(clone)
    assert "does not take events" in problem(clone)
    endpoint.listen()
    endpoint.answer = 503
    emit(clone)
    assert LastEvent.of(entry) == LastEvent()
    endpoint.answer = 201
    emit(clone)
    assert types(endpoint.events) == ["START", "COMPLETE"]
    assert problem(clone) == ""


def test_an_event_that_is_refused_stops_no_other(
    clone: FakeClone, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.listen()
    endpoint.answer = 422
    monkeypatch.setenv("OPENLINEAGE_URL", endpoint.url)
    refused = clone.run("sft")
    emit(clone)
    assert "422" in (LastEvent.of(refused).problem or "")
    endpoint.answer = 201
    clone.run("evaluate_sft")
    emit(clone)
    assert [event["job"]["name"] for event in endpoint.events] == ["evaluate_sft"] * 2


def test_a_killed_process_is_followed_by_one_that_tells_the_rest(
    clone: FakeClone, to_file: Path
) -> None:
    entry = clone.begin("sft")
    start_emitter(clone.repository)
    until(lambda: LastEvent.of(entry).event == "START", "the first event")
    [process] = emitters(clone)
    process.kill()
    process.wait()
    clone.finish(entry)
    # MLflow is switched off; what it has to do with is not this.
    assert ship_all(clone.repository) == []
    assert types(sent(to_file)) == ["START", "COMPLETE"]
    kill_all(emitters(clone))
    # Killed between the event and the cursor: said twice, and the same both times.
    LastEvent("START", 1).save(entry)
    emit(clone)
    assert types(sent(to_file)) == ["START", "COMPLETE", "COMPLETE"]
    assert sent(to_file)[1] == sent(to_file)[2]


def test_without_configuration_nothing_is_started_or_imported(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone.run("sft")
    start_emitter(clone.repository)
    assert emitters(clone) == []
    assert not is_configured(clone.repository)
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:1")
    assert is_configured(clone.repository)
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    assert not is_configured(clone.repository)


def test_configured_and_not_installed_is_said_and_stops_nothing(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    start_emitter(clone.repository)
    assert "pip install" in problem(clone)
    assert emitters(clone) == []


def test_a_configuration_without_a_transport_is_said(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_CONFIG", str(clone.root / "mistyped.yml"))
    clone.run("sft")
    emit(clone)
    assert "names no transport" in problem(clone)


def test_no_secret_is_sent(
    clone: FakeClone, to_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-planted")
    entry = clone.begin("sft")
    clone.end(entry, "failed", error="401 for https://me:pa55word@hub/x with hunter2-planted")
    emit(clone)
    text = to_file.read_text()
    assert "401 for" in text
    assert "hunter2" not in text
    assert "pa55word" not in text
