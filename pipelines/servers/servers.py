"""`lockstep up` and `lockstep down`: MLflow, Prefect, a Prefect worker and the pages of a clone.

All are separate processes that outlive the command and listen on loopback only, where MLflow and
Prefect require the clone's password, and the pages the token of their link. The databases are
SQLite files under `.lockstep`, the logs are in `.lockstep/servers`. Neither password nor token is
in a log, an address or a command line. Schedules fire only while the servers run.

Stages write to MLflow's database file whether its server runs or not: one store, one address, so
that no run is ever shipped twice.
"""

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pipelines.base.console import Console, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from pipelines.base.processes import end_processes, start_of
from pipelines.base.redact import redact
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository
from pipelines.config.strict_yaml import load_yaml
from pipelines.servers import prefect_api
from pipelines.servers.automations import keep_automation
from pipelines.servers.password import USER, password_file, password_of
from pipelines.servers.prefect_api import Api
from pipelines.servers.running import NAMES, Server, note_of, running, write_note
from pipelines.servers.settings import HOST, UI_PORT, prefect_settings, server_environment
from pipelines.tracking.cursor import runs_page
from pipelines.warm.client import end_servers

MLFLOW_PORT = 5050
PREFECT_PORT = 4250
ANSWERING = ("mlflow", "prefect", "ui")
"""Those that have an address; the worker polls Prefect."""
NOTIFY_DOCS = "docs/tracking.md#notifications"
HEALTH = {"mlflow": "/health", "prefect": "/api/health", "ui": "/"}
"""What a server answers without a password."""
PREFECT_FILE = "pipelines/prefect.yaml"
START_LIMIT_S = 600.0
CANCEL_LIMIT_S = 40.0
POLL_S = 0.25
LOG_TAIL = 20


def up(
    repository: Repository,
    console: Console,
    mlflow_port: int | None = None,
    prefect_port: int | None = None,
    ui_port: int | None = None,
    schedules: bool = True,
) -> None:
    """Start what is not running, deploy the schedules, and print the addresses."""
    with _only_command(repository):
        before = running(repository)
        if before.keys() == set(NAMES):
            console.line("already running:")
        else:
            ports = {"mlflow": mlflow_port, "prefect": prefect_port, "ui": ui_port}
            _start_missing(repository, console, before, ports, schedules)
        servers = running(repository)
        if "prefect" in servers and keep_automation(
            repository, _api(repository, servers["prefect"])
        ):
            console.line(f"Prefect tells of flow runs that no stage ended ({NOTIFY_DOCS})")
    _say_addresses(repository, console)


def down(repository: Repository, console: Console) -> None:
    """Cancel the flow runs in progress and stop every process that `up` started."""
    with _only_command(repository):
        servers = running(repository)
        if "worker" in servers and "prefect" in servers:
            _cancel_flow_runs(_api(repository, servers["prefect"]), servers["worker"], console)
        # The worker first, so that it never lacks its server.
        for name in reversed(NAMES):
            if name in servers:
                console.progress(f"stopping {name}")
                # What was started from the pages goes on without them.
                end_processes([servers[name].pid], with_children=name != "ui")
                console.line(f"stopped {name} (process {servers[name].pid})")
        note_of(repository).unlink(missing_ok=True)
        ready = end_servers(repository)
        if ready:
            console.line(f"stopped {len(ready)} processes that were ready for stages")
        if not (servers or ready):
            console.line("nothing to stop: no server was started here")


@contextmanager
def _only_command(repository: Repository) -> Iterator[None]:
    with hold_lock(repository.shared_home / "servers.lock") as held:
        if not held:
            raise LockstepError("another `lockstep up` or `down` is running in this clone")
        yield


def _start_missing(
    repository: Repository,
    console: Console,
    servers: dict[str, Server],
    ports: Mapping[str, int | None],
    schedules: bool,
) -> None:
    """Start what is not in `servers`. If one fails, those started here are stopped again."""
    servers = dict(servers)
    started: list[Server] = []
    begun = time.monotonic()

    def start(name: str, url: str, words: list[str]) -> Server:
        environment = server_environment(repository)
        if name in ("prefect", "worker"):
            environment |= prefect_settings(repository, url)
        servers[name] = _spawn(repository, name, url, words, environment)
        started.append(servers[name])
        write_note(repository, servers)
        return servers[name]

    try:
        if "mlflow" not in servers:
            port = _port(console, "MLflow", ports["mlflow"], MLFLOW_PORT)
            words = [sys.executable, "-m", "pipelines.servers.mlflow_server", str(repository.root)]
            start("mlflow", f"http://{HOST}:{port}", [*words, str(port)])
        if "prefect" not in servers:
            if "worker" in servers:
                end_processes([servers.pop("worker").pid])
            port = _port(console, "Prefect", ports["prefect"], PREFECT_PORT)
            words = _prefect("server", "start", "--host", HOST, "--port", str(port))
            start("prefect", f"http://{HOST}:{port}", words)
        if "ui" not in servers:
            port = _port(console, "the pages' server", ports["ui"], UI_PORT)
            words = [sys.executable, "-m", "pipelines.ui.server", str(repository.root), str(port)]
            start("ui", f"http://{HOST}:{port}", words)
        _wait(console, [servers[name] for name in ANSWERING], begun, is_healthy)
        if "worker" not in servers:
            api = _api(repository, servers["prefect"])
            prefect_api.make_work_pool(api)
            prefect_api.close_lost_flow_runs(api)
            console.line(f"deploying {PREFECT_FILE}")
            _deploy(repository, servers["prefect"], schedules)
            # One at a time over all deployments: they share the clone.
            where = ["--pool", prefect_api.WORK_POOL, "--type", "process", "--name", "lockstep"]
            words = _prefect("worker", "start", "--limit", "1", *where)
            worker = start("worker", servers["prefect"].url, words)
            _wait(console, [worker], begun, lambda _: prefect_api.worker_is_online(api))
    except BaseException:
        end_processes([server.pid for server in reversed(started)])
        raise


def _prefect(*words: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *words]


def _spawn(
    repository: Repository, name: str, url: str, words: list[str], environment: dict[str, str]
) -> Server:
    """Start a process that outlives this one and whose output goes to its log."""
    log = repository.shared_home / "servers" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with open_log(log) as stream:
        process = subprocess.Popen(
            words,
            cwd=repository.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(name, url, process.pid, start_of(process.pid), str(log))


def _port(console: Console, what: str, asked: int | None, default: int) -> int:
    """The requested port, which must be free; else the default, or any free port."""
    if asked is not None:
        if not _is_free(asked):
            raise LockstepError(f"port {asked} for {what} is in use; choose another one")
        return asked
    if _is_free(default):
        return default
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    console.line(f"port {default} is in use; {what} uses {port}")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _wait(
    console: Console, starting: list[Server], begun: float, ready: Callable[[Server], bool]
) -> None:
    """Wait until all of them answer; for one that does not, the error shows its log."""
    logs = " ".join(server.log for server in starting)
    console.line(f"waiting for {_names(starting)} to answer (log: {logs})")
    while starting := [server for server in starting if not ready(server)]:
        taken = time.monotonic() - begun
        console.progress(f"waiting for {_names(starting)} ({seconds(taken)})")
        for server in starting:
            if not server.lives:
                raise LockstepError(f"{server.name} did not start:\n{_tail(server)}")
        if taken > START_LIMIT_S:
            raise LockstepError(
                f"{starting[0].name} does not answer after {seconds(taken)}:\n{_tail(starting[0])}"
            )
        time.sleep(POLL_S)


def _names(servers: list[Server]) -> str:
    *others, last = (server.name for server in servers)
    return f"{', '.join(others)} and {last}" if others else last


def is_healthy(server: Server) -> bool:
    """Whether it answers, and not another process on its port."""
    return _listens(server) and prefect_api.answers(server.url + HEALTH[server.name])


def _listens(server: Server) -> bool:
    """Otherwise the port belongs to another process, which would receive the password."""
    port = urlsplit(server.url).port
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(server.pid)
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for each in (process, *process.children(recursive=True))
            for connection in each.net_connections("tcp")
        )
    return False


def _is_open_to_all(server: Server) -> bool:
    """Whether it requires no password."""
    path = "/api/admin/version" if server.name == "prefect" else "/version"
    return prefect_api.answers(server.url + path)


def _tail(server: Server) -> str:
    text = redact(Path(server.log).read_text(errors="replace", encoding="utf-8"))
    lines = (f"  | {line}\n" for line in text.splitlines()[-LOG_TAIL:])
    return "".join(lines) + f"full log: {server.log}"


def _deploy(repository: Repository, prefect: Server, schedules: bool) -> None:
    done = subprocess.run(
        _prefect("deploy", "--all", "--prefect-file", PREFECT_FILE),
        cwd=repository.root,
        env=server_environment(repository) | prefect_settings(repository, prefect.url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise LockstepError(
            f"{PREFECT_FILE} cannot be deployed:\n{redact(done.stdout + done.stderr)}"
        )
    prefect_api.set_schedules(_api(repository, prefect), active=schedules)


def _cancel_flow_runs(api: Api, worker: Server, console: Console) -> None:
    """Let Prefect cancel the running flows, so that they end as Cancelled without jobs left."""
    try:
        runs = prefect_api.open_flow_runs(api)
        for run in runs:
            console.line(f"cancelling flow run {run['name']}")
            prefect_api.cancel_flow_run(api, run["id"])
        deadline = time.monotonic() + CANCEL_LIMIT_S
        while runs and psutil.Process(worker.pid).children() and time.monotonic() < deadline:
            console.progress("waiting for its jobs to finish")
            time.sleep(POLL_S)
    except (OSError, LockstepError, psutil.NoSuchProcess):
        console.line("the Prefect server does not answer; stopping its flow runs without it")


def _say_addresses(repository: Repository, console: Console) -> None:
    servers = running(repository)
    if gone := [name for name in ANSWERING if name not in servers]:
        raise LockstepError(
            f"{' and '.join(gone)} exited right after starting; see "
            f"{repository.shared_home}/servers/*.log, then rerun `lockstep up`"
        )
    page = runs_page(repository)
    console.line(f"MLflow   {servers['mlflow'].url}{page}   runs, metrics, comparison")
    console.line(
        f"Prefect  {servers['prefect'].url}   flow runs that it starts, their logs, schedules"
    )
    console.line(f"pages    {servers['ui'].url}   `lockstep ui` prints the link that opens them")
    password = f"cat {shlex.quote(str(password_file(repository)))}"
    console.line(f"the first two require a password:  {password}   (the MLflow user is {USER})")
    if open_to_all := [name for name in ("mlflow", "prefect") if _is_open_to_all(servers[name])]:
        console.line(
            f"but {' and '.join(open_to_all)} run without one, open to every user of this machine: "
            "run lockstep down, then lockstep up"
        )
    api = _api(repository, servers["prefect"])
    deployed = [item for item in prefect_api.deployments(api) if item["schedules"]]
    active = [item for item in deployed if not item["paused"]]
    console.line(
        "schedules (they fire only while these servers run):" if active else "no schedules"
    )
    for deployment in active:
        for item in deployment["schedules"]:
            when = item["schedule"]
            console.line(
                f"  lockstep/{deployment['name']}: {when.get('cron')} {when.get('timezone')}"
            )
    first = load_yaml(repository.root / PREFECT_FILE)["deployments"][0]["name"]
    console.line(
        f"run one now:  PREFECT_API_URL={api.url} PREFECT_API_AUTH_STRING=$({password}) "
        f"prefect deployment run lockstep/{first}"
    )
    console.line("stop them:    lockstep down")


def _api(repository: Repository, prefect: Server) -> Api:
    return Api(prefect.api, password_of(repository))
