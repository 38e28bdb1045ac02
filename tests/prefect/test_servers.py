"""`lockstep up` and `down` with real servers, and what a deployment does there."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
import pytest
from prefect_servers import LocalServers, send_what_waits
from tiny_project import TinyProject, make_project

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.processes import start_of
from pipelines.base.repository import Repository
from pipelines.commands.status import status
from pipelines.commands.ui import ui
from pipelines.config.strict_yaml import load_yaml
from pipelines.servers import servers
from pipelines.servers.password import password_file
from pipelines.servers.prefect_api import open_flow_runs
from pipelines.servers.running import write_note
from pipelines.ui.clone import token_file, token_of
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from tests.conftest import Clone, kill_each
from tests.ports import free_port
from tests.sshd import NAME, serving
from tests.waiting import TIMEOUT_S, answers, succeeded, until, until_said

pytestmark = pytest.mark.slow


def processes_of(repository: Repository) -> list[psutil.Process]:
    """Every living process that belongs to the servers of this clone, by its environment."""
    home = str(repository.home / "prefect")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME") == home:
                found.append(process)
        except psutil.Error:
            continue
    return found


def files_with(text: str, folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def at_work_in(folder: Path, others: list[int]) -> list[psutil.Process]:
    """What was forked for the stages in that folder: all processes there but these others."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            above = {process.pid, *(one.pid for one in process.parents())}
            if process.cwd() == str(folder) and not above & {*others, os.getpid()}:
                found.append(process)
    return found


def test_up_says_where_everything_is(local_servers: LocalServers) -> None:
    running = servers.running(local_servers.repository)
    assert running.keys() == {"mlflow", "prefect", "ui", "worker"}
    for name in ("mlflow", "prefect", "ui"):
        assert running[name].url in local_servers.said
    assert "lockstep/nightly: 0 2 * * * UTC" in local_servers.said
    noted = json.loads((local_servers.repository.home / "servers.json").read_text())
    assert noted["prefect"]["api_url"] == local_servers.api.url


def test_up_says_what_it_waits_for(local_servers: LocalServers) -> None:
    said = local_servers.said.splitlines()
    waited = [line.partition(" (log: ")[0] for line in said if line.startswith("waiting for ")]
    assert waited == [
        "waiting for mlflow, prefect and ui to answer",
        "waiting for worker to answer",
    ]
    assert "deploying pipelines/prefect.yaml" in said


def test_up_serves_the_pages_and_their_link_is_told_by_the_command_alone(
    local_servers: LocalServers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = local_servers.repository
    url, token = servers.running(repository)["ui"].url, token_of(repository)
    assert token not in local_servers.said
    assert httpx.get(f"{url}/api/run/stages", timeout=TIMEOUT_S).status_code == 403
    headers = {"X-Lockstep-Token": token}
    pages = httpx.get(f"{url}/api/pages", headers=headers, timeout=TIMEOUT_S)
    assert pages.json()["root"] == str(repository.root)
    monkeypatch.chdir(repository.root)
    ui(port=None, browse=False)
    assert f"{url}/#token={token}" in capsys.readouterr().out
    status(as_json=True)
    assert json.loads(capsys.readouterr().out)["servers"]["ui"] == url
    status()
    assert f"server ui: {url}" in capsys.readouterr().out


def test_a_second_up_starts_nothing(local_servers: LocalServers) -> None:
    before = servers.running(local_servers.repository)
    said = io.StringIO()
    servers.up(local_servers.repository, Console(said))
    assert said.getvalue().startswith("already running:\n")
    assert before["mlflow"].url in said.getvalue()
    assert servers.running(local_servers.repository) == before


def test_up_on_a_host_forwards_its_servers_until_ctrl_c(
    local_servers: LocalServers, tmp_path: Path
) -> None:
    there = local_servers.repository.root
    clone = Clone(tmp_path)
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).write_bytes((there / name).read_bytes())
    clone.run("git", "init", "-q")
    clone.run("git", "config", "lockstep.hostPython", sys.executable)
    with serving({"LOCKSTEP_TRACKING": "off"}) as sshd:
        clone.variables |= sshd.variables
        up = clone.start("lockstep", "up", "--host", f"{NAME}:{there}")
        said = until_said(up, "the link of the pages")
        here = re.findall(r"^(?:MLflow|Prefect|pages) +(http://\S+:\d+)$", said, re.MULTILINE)
        for url, path in zip(here, ("/health", "/api/health", "/"), strict=True):
            assert httpx.get(url + path, timeout=TIMEOUT_S).status_code == 200
        assert local_servers.password not in said
        up.send_signal(signal.SIGINT)
        succeeded(up)
        assert not answers(f"{here[0]}/health")
    assert servers.running(local_servers.repository).keys() == set(servers.NAMES)


def test_servers_listen_on_loopback_only(local_servers: LocalServers) -> None:
    listening = []
    for process in processes_of(local_servers.repository):
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="inet")
            listening += [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3
    assert set(listening) == {"127.0.0.1"}


def test_every_deployment_has_a_schedule_and_runs_one_at_a_time(
    local_servers: LocalServers,
) -> None:
    written = load_yaml(local_servers.repository.root / servers.PREFECT_FILE)["deployments"]
    *scheduled, alert = written
    assert (len(scheduled), alert["name"], alert["schedules"]) == (2, "alert", [])
    for item in scheduled:
        found = local_servers.deployment(item["name"])
        assert not found["paused"]
        assert found["schedules"][0]["active"]
        assert found["global_concurrency_limit"]["limit"] == 1
        for target in item["parameters"].get("targets", []):
            bind(target, Params())


def test_a_schedule_fires_and_the_run_does_the_stages(
    local_servers: LocalServers, served_project: TinyProject
) -> None:
    deployment = local_servers.deployment("nightly")["id"]
    every_ten_seconds = {
        "interval": 10,
        "anchor_date": datetime.now(UTC).isoformat(),
        "timezone": "UTC",
    }
    schedules = f"/deployments/{deployment}/schedules"
    made = local_servers.post(schedules, [{"schedule": every_ten_seconds, "active": True}])
    # The server looks at all deployments once a minute, at those that changed every few seconds.
    for action in ("pause_deployment", "resume_deployment"):
        local_servers.post(f"/deployments/{deployment}/{action}", {})

    def first_run() -> str | None:
        begun = {"any_": ["RUNNING", "COMPLETED", "FAILED", "CRASHED"]}
        query = {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": begun}},
            "sort": "START_TIME_ASC",
        }
        found = local_servers.post("/flow_runs/filter", query)
        return next((run["id"] for run in found if run["auto_scheduled"]), None)

    try:
        run = local_servers.until(first_run, "a run by the schedule")
    finally:
        # With it go the runs that have not begun.
        local_servers.delete(f"{schedules}/{made[0]['id']}")
    state = local_servers.ended(run)
    until(lambda: not open_flow_runs(local_servers.api), "no run is under way")
    assert (state["type"], state["message"]) == ("COMPLETED", "4 stages done, 0 were up to date")
    local_servers.until_tasks(run, dict.fromkeys("abcd", "Completed"))
    first, *between, last = served_project.started()
    assert (first, sorted(between), last) == ("a", ["b", "c"], "d")


def test_cancelling_a_flow_run_ends_its_stages(
    local_servers: LocalServers, served_project: TinyProject
) -> None:
    served_project.behave(b={"seconds": 3000}, c={"seconds": 3000})
    run = local_servers.start_run("nightly")
    local_servers.until(lambda: len(served_project.started()) == 3, "three stages begun", run)
    pids = [event["pid"] for event in served_project.events("start")[1:]]
    local_servers.cancel(run)
    until(lambda: not any(map(psutil.pid_exists, pids)), "the stages are ended")
    assert local_servers.ended(run)["type"] == "CANCELLED"
    # The lock is free and what was done is kept.
    served_project.behave()
    again = local_servers.ended(local_servers.start_run("nightly"))
    assert again["message"] == "3 stages done, 1 were up to date"


def test_a_flow_process_that_is_killed_leaves_a_clone_that_goes_on(
    local_servers: LocalServers, served_project: TinyProject
) -> None:
    hold = served_project.root / ".lockstep/hold"
    hold.touch()
    served_project.behave(a={"while_there_is": str(hold)})
    run = local_servers.start_run("nightly")
    local_servers.until(served_project.started, "a stage begun", run)
    worker = servers.running(local_servers.repository)["worker"]
    kill_each(psutil.Process(worker.pid).children())
    # The next run waits for the stage that was left running, and finds it done.
    after = local_servers.start_run("nightly")
    local_servers.until_logged(after, "waiting for what an earlier pipeline left running")
    hold.unlink()
    state = local_servers.ended(after)
    assert (state["type"], state["message"]) == ("COMPLETED", "3 stages done, 1 were up to date")
    assert served_project.started().count("a") == 1
    assert local_servers.ended(run)["type"] == "CRASHED"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_if_one_does_not_start_the_others_are_stopped(
    tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(make_project(tmp_path / "project").root)
    # A file where Prefect's folder should be.
    repository.home.mkdir()
    (repository.home / "prefect").write_text("")
    said = io.StringIO()
    monkeypatch.setattr(servers, "MLFLOW_PORT", taken_port)
    with pytest.raises(LockstepError, match="prefect did not start") as raised:
        servers.up(repository, Console(said), prefect_port=free_port(), ui_port=free_port())
    assert "unable to open database file" in str(raised.value)
    assert str(repository.home / "servers/prefect.log") in str(raised.value)
    assert f"port {taken_port} is in use; MLflow uses" in said.getvalue()
    assert processes_of(repository) == []
    assert servers.running(repository) == {}


def test_a_port_that_was_asked_for_and_is_taken(tmp_path: Path, taken_port: int) -> None:
    repository = Repository(make_project(tmp_path / "project").root)
    with pytest.raises(LockstepError, match=f"port {taken_port} for MLflow is in use"):
        servers.up(repository, Console(io.StringIO()), mlflow_port=taken_port)
    assert processes_of(repository) == []


def test_down_ends_the_pages_and_not_what_was_started_from_them(tmp_path: Path) -> None:
    """Stands for their server: a process with a child, as `lockstep run` is one of it."""
    repository = Repository(tmp_path)
    program = (
        "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pages:
        assert pages.stdout is not None
        run = psutil.Process(int(pages.stdout.readline()))
        pid, started = pages.pid, start_of(pages.pid)
        server = servers.Server("ui", "http://127.0.0.1:1", pid, started, "")
        write_note(repository, {"ui": server})
        said = io.StringIO()
        servers.down(repository, Console(said))
        assert pages.wait(TIMEOUT_S) != 0
    assert "stopped ui" in said.getvalue()
    assert run.is_running()
    run.kill()


def test_up_again_mends_what_died_and_down_stops_everything(
    local_servers: LocalServers, served_project: TinyProject
) -> None:
    """The last test of the folder: it stops the servers that all of them share."""
    local, project = local_servers, served_project
    before = servers.running(local.repository)
    project.behave(a={"seconds": 3000})
    lost = local.start_run("nightly")
    local.until(project.started, "a stage begun", lost)
    # As a machine that goes down: nobody can say how the run ended.
    worker = psutil.Process(before["worker"].pid)
    others = [before[name].pid for name in ("mlflow", "prefect", "ui")]
    killed = [worker, *worker.children(recursive=True), *at_work_in(project.root, others)]
    kill_each(killed)
    psutil.wait_procs(killed)
    servers.up(local.repository, Console(io.StringIO()))
    after = servers.running(local.repository)
    assert (after["mlflow"], after["prefect"]) == (before["mlflow"], before["prefect"])
    assert local.state(lost)["type"] == "CRASHED"

    run = local.start_run("nightly")
    local.until(lambda: len(project.started()) == 2, "two stages begun", run)
    send_what_waits()
    for process in processes_of(local.repository):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            assert local.password not in words
            assert token_of(local.repository) not in words
    said = io.StringIO()
    servers.down(local.repository, Console(said))
    assert "cancelling flow run" in said.getvalue()
    for name in ("worker", "ui", "prefect", "mlflow"):
        assert f"stopped {name}" in said.getvalue()
    assert processes_of(local.repository) == []
    assert not psutil.pid_exists(project.events("start")[1]["pid"])
    assert not (local.repository.home / "servers.json").exists()
    # Neither in a log, nor in a database, nor in the ledger.
    assert files_with(local.password, project.root) == [password_file(local.repository)]
    token = token_of(local.repository)
    assert files_with(token, project.root) == [token_file(local.repository)]

    said = io.StringIO()
    servers.down(local.repository, Console(said))
    assert "nothing to stop" in said.getvalue()
    assert servers.running(local.repository) == {}
