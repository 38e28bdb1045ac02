"""The servers of `lockstep up` are for their owner: what others on the same machine get of them."""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect_servers import LocalServers
from tiny_project import REPOSITORY

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.processes import start_of
from pipelines.base.repository import Repository
from pipelines.servers import prefect_api, servers
from pipelines.servers.password import password_file, password_of
from pipelines.servers.prefect_api import Api
from pipelines.ui.clone import token_file
from tests.waiting import TIMEOUT_S

ANOTHER_USER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request
urls, files = json.load(sys.stdin)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
def ask(url, body):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
def read(path):
    try:
        return open(path, errors="replace").read()
    except PermissionError:
        return None
print(json.dumps([[ask(*each) for each in urls], [read(path) for path in files]]))
"""


def as_another_user(urls: list[tuple[str, Any]], files: list[str | Path]) -> tuple[list[int], Any]:
    """The status of each request and the text of each file, None for what cannot be read."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER],
        input=json.dumps([urls, [str(path) for path in files]]),
        env={},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    statuses, texts = json.loads(done.stdout)
    return statuses, texts


def ask(url: str, password: str | None = None, **headers: str) -> httpx.Response:
    auth = None if password is None else ("lockstep", password)
    return httpx.get(url, auth=auth, headers=headers, timeout=TIMEOUT_S, verify=False)


@pytest.fixture
def address() -> Iterator[str]:
    """A server that gives everybody an empty list."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_another_user_of_the_machine_gets_nothing_from_either_server(
    local_servers: LocalServers,
) -> None:
    running = servers.running(local_servers.repository)
    prefect, mlflow = running["prefect"].api, running["mlflow"].url
    deployment = local_servers.deployment("nightly")["id"]
    requests = [
        (f"{prefect}/deployments/filter", {}),
        (f"{prefect}/deployments/{deployment}/create_flow_run", {}),
        (f"{prefect}/work_pools/", {"name": "mine", "type": "process"}),
        (f"{prefect}/admin/settings", None),
        (f"{prefect}/docs", None),
        (f"{mlflow}/", None),
        (f"{mlflow}/version", None),
        (f"{mlflow}/api/2.0/mlflow/experiments/search", {"max_results": 1}),
        (f"{mlflow}/api/2.0/mlflow/experiments/create", {"name": "mine"}),
        (f"{mlflow}/api/2.0/mlflow-artifacts/artifacts", None),
        (f"{mlflow}/ajax-api/3.0/mlflow/assistant/config", None),
        (f"{mlflow}/graphql", {"query": "{}"}),
        (f"{mlflow}/health/../version", None),
    ]
    of_processes = [f"/proc/{running[name].pid}/environ" for name in running]
    commands = [f"/proc/{running[name].pid}/cmdline" for name in running]
    statuses, texts = as_another_user(requests, [*of_processes, *commands])
    assert statuses == [401] * len(requests)
    assert texts[:4] == [None] * 4
    assert all(text and local_servers.password not in text for text in texts[4:])
    pages = running["ui"].url
    paths = ["/api/run/stages", "/api/run/events", "/api/pages", "/api/samples/names"]
    asked = [(pages + path, None) for path in paths] + [(f"{pages}/api/run/start", {})]
    statuses, texts = as_another_user(asked, [token_file(local_servers.repository)])
    assert (statuses, texts) == ([403] * len(asked), [None])


def test_another_user_cannot_read_the_password() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Open to all, unlike the folders of pytest.
        Path(folder).chmod(0o755)
        repository = Repository(Path(folder))
        password = password_of(repository)
        (repository.home / "servers.json").write_text("neighbour")
        paths: list[str | Path] = [repository.home / "servers.json", password_file(repository)]
        assert as_another_user([], paths)[1] == ["neighbour", None]
        password_file(repository).chmod(0o644)
        assert password_of(repository) == password
        assert as_another_user([], paths)[1] == ["neighbour", None]


def test_each_clone_has_a_password_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    clones = [Repository(tmp_path / name) for name in ("one", "two", "one")]
    first, second, again = map(password_of, clones)
    assert first == again != second
    assert len(first) == 32


@pytest.mark.slow
def test_up_says_how_to_get_in(local_servers: LocalServers) -> None:
    assert str(password_file(local_servers.repository)) in local_servers.said
    assert "the MLflow user is lockstep" in local_servers.said
    assert local_servers.password not in local_servers.said
    assert "can use" not in local_servers.said
    mlflow = servers.running(local_servers.repository)["mlflow"].url
    answer = ask(f"{mlflow}/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    for path in ("/", "/version", "/api/2.0/mlflow/experiments/search?max_results=1"):
        assert ask(mlflow + path, local_servers.password).status_code == 200
        assert ask(mlflow + path, "a guess").status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:6666", "null"])
def test_a_page_of_another_server_is_refused_where_the_browser_knows_the_password(
    local_servers: LocalServers, origin: str
) -> None:
    running = servers.running(local_servers.repository)
    mlflow = f"{running['mlflow'].url}/version"
    own = ask(mlflow, local_servers.password, Origin=running["mlflow"].url)
    assert own.status_code == 200
    refused = ask(mlflow, local_servers.password, Origin=origin)
    assert refused.status_code == 403
    for answer in (refused, ask(f"{running['prefect'].api}/health", Origin=origin)):
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.slow
def test_a_prefect_server_with_another_password_is_an_error_that_says_what_to_do(
    local_servers: LocalServers,
) -> None:
    with pytest.raises(LockstepError, match=r"different password.*lockstep down"):
        prefect_api.deployments(Api(local_servers.api.url, "an older one"))


def test_servers_that_ask_for_no_password_go_on_and_are_named(tmp_path: Path, address: str) -> None:
    """A fake one: those of today all ask."""
    repository = Repository(tmp_path)
    (tmp_path / servers.PREFECT_FILE).parent.mkdir()
    shutil.copy(REPOSITORY / servers.PREFECT_FILE, tmp_path / servers.PREFECT_FILE)
    me = {"url": address, "pid": os.getpid(), "pid_started": start_of(os.getpid()), "log": ""}
    atomic.write_json(repository.home / "servers.json", dict.fromkeys(servers.NAMES, me))
    said = io.StringIO()
    servers.up(repository, Console(said))
    assert said.getvalue().startswith("already running:\n")
    assert "mlflow and prefect run without one" in said.getvalue()


def test_somebody_else_on_the_port_of_a_server_is_not_taken_for_it(address: str) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        server = servers.Server("mlflow", address, other.pid, start_of(other.pid), "")
        taken_for_it = servers.is_healthy(server)
        other.kill()
    assert not taken_for_it
    mine = servers.Server("mlflow", address, os.getpid(), start_of(os.getpid()), "")
    assert servers.is_healthy(mine)
