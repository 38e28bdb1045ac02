"""`lockstep up` and `lockstep down`: MLflow, Prefect and a Prefect worker on this machine.

All three are processes of their own that outlive the command and listen on loopback only. Their
databases are SQLite files under `.lockstep`, their logs lie in `.lockstep/servers`. What runs is
noted in `.lockstep/servers.json`; a process counts only while it lives. Schedules fire only while
they run.

Stages go on writing to MLflow's database file, whether its server runs or not: one store, one
address, so that no run is ever shipped twice.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pipelines import atomic, prefect_api
from pipelines.console import Console, seconds
from pipelines.errors import LockstepError
from pipelines.locks import hold_lock
from pipelines.processes import end_processes, process_lives, start_of
from pipelines.redact import redact
from pipelines.repository import Repository
from pipelines.strict_yaml import load_yaml
from pipelines.warm.client import end_servers

HOST = "127.0.0.1"
MLFLOW_PORT = 5050
PREFECT_PORT = 4250
PREFECT_FILE = "pipelines/prefect.yaml"
START_LIMIT_S = 600.0
CANCEL_LIMIT_S = 40.0
POLL_S = 0.25
LOG_TAIL = 20


@dataclass(frozen=True)
class Server:
    """One process that `up` started."""

    name: str
    url: str
    pid: int
    pid_started: str
    log: str

    @property
    def api(self) -> str:
        """Of Prefect's server, and of the worker that polls it."""
        return f"{self.url}/api"

    @property
    def lives(self) -> bool:
        return process_lives(self.pid, self.pid_started)


def up(
    repository: Repository,
    console: Console,
    mlflow_port: int | None = None,
    prefect_port: int | None = None,
    schedules: bool = True,
) -> None:
    """Start what does not run yet, deploy the schedules, and say where everything is."""
    with hold_lock(_home(repository) / "servers.lock") as held:
        if not held:
            raise LockstepError("another `lockstep up` or `down` is at work in this clone")
        before = running(repository)
        if before.keys() == {"mlflow", "prefect", "worker"}:
            console.line("already running:")
        else:
            _start_missing(repository, console, before, mlflow_port, prefect_port, schedules)
    _say_addresses(repository, console)


def down(repository: Repository, console: Console) -> None:
    """Cancel the flow runs in progress and stop every process that `up` started."""
    with hold_lock(_home(repository) / "servers.lock") as held:
        if not held:
            raise LockstepError("another `lockstep up` or `down` is at work in this clone")
        servers = running(repository)
        if "worker" in servers and "prefect" in servers:
            _cancel_flow_runs(servers["prefect"], servers["worker"], console)
        # The worker first, so that nobody misses the server.
        for name in ("worker", "prefect", "mlflow"):
            if name in servers:
                console.progress(f"stopping {name}")
                end_processes([servers[name].pid])
                console.line(f"stopped {name} (process {servers[name].pid})")
        _note(repository).unlink(missing_ok=True)
        ready = end_servers(repository)
        if ready:
            console.line(f"stopped {len(ready)} processes that were ready for stages")
        if not (servers or ready):
            console.line("nothing to stop: neither MLflow nor Prefect was started here")


def running(repository: Repository) -> dict[str, Server]:
    """The servers of this clone that live, by name: mlflow, prefect, worker."""
    noted = atomic.read_json(_note(repository)) or {}
    servers = {
        name: Server(name, **{key: values[key] for key in ("url", "pid", "pid_started", "log")})
        for name, values in noted.items()
    }
    return {name: server for name, server in servers.items() if server.lives}


def runtime_environment(repository: Repository) -> dict[str, str]:
    """Variables that point Prefect's client at the server that runs here, if one does."""
    prefect = running(repository).get("prefect")
    if prefect is None:
        return {}
    home = str(_home(repository) / "prefect")
    return {"PREFECT_API_URL": prefect.api, "PREFECT_HOME": home, **_no_proxy()}


def _start_missing(
    repository: Repository,
    console: Console,
    servers: dict[str, Server],
    mlflow_port: int | None,
    prefect_port: int | None,
    schedules: bool,
) -> None:
    """Bring up what is not in `servers`. If one fails, those started here are stopped again."""
    servers = dict(servers)
    started: list[Server] = []
    begun = time.monotonic()

    def start(name: str, url: str, words: list[str]) -> Server:
        api = "" if name == "mlflow" else f"{url}/api"
        servers[name] = _spawn(repository, name, url, words, _environment(repository, api))
        started.append(servers[name])
        _write_note(repository, servers)
        return servers[name]

    try:
        if "mlflow" not in servers:
            port = _port(console, "MLflow", mlflow_port, MLFLOW_PORT)
            start("mlflow", f"http://{HOST}:{port}", _mlflow_command(repository, port))
        if "prefect" not in servers:
            if "worker" in servers:
                end_processes([servers.pop("worker").pid])
            port = _port(console, "Prefect", prefect_port, PREFECT_PORT)
            words = _prefect("server", "start", "--host", HOST, "--port", str(port))
            start("prefect", f"http://{HOST}:{port}", words)
        _wait(console, [servers["mlflow"], servers["prefect"]], begun, _is_well)
        if "worker" not in servers:
            api = servers["prefect"].api
            prefect_api.make_work_pool(api)
            prefect_api.close_lost_flow_runs(api)
            console.progress(f"deploying {PREFECT_FILE}")
            _deploy(repository, servers["prefect"], schedules)
            # One at a time over all deployments: they share the clone.
            where = ["--pool", prefect_api.WORK_POOL, "--type", "process", "--name", "lockstep"]
            words = _prefect("worker", "start", "--limit", "1", *where)
            worker = start("worker", servers["prefect"].url, words)
            _wait(console, [worker], begun, lambda _: prefect_api.worker_is_online(api))
    except BaseException:
        end_processes([server.pid for server in reversed(started)])
        raise


def _mlflow_command(repository: Repository, port: int) -> list[str]:
    home = _home(repository)
    # A plain folder as artifact root, so that runs can be read with the server stopped.
    artifacts = str(home / "mlartifacts")
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}", "--workers", "1"),
        *("--default-artifact-root", artifacts, "--artifacts-destination", artifacts),
    ]


def _prefect(*words: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *words]


def _spawn(
    repository: Repository, name: str, url: str, words: list[str], environment: dict[str, str]
) -> Server:
    """Start a process that outlives this one and whose output goes to its log."""
    log = _home(repository) / "servers" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
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


def _environment(repository: Repository, api: str) -> dict[str, str]:
    """What all of them get. The user's own Prefect settings may name another server, so they go."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    prefect = {"PREFECT_API_URL": api} if api else {}
    return {
        **kept,
        **prefect,
        **_no_proxy(),
        "PREFECT_HOME": str(_home(repository) / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # SQLite has one writer at a time; on a busy machine the others wait longer than 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # The flow runs with the code of this clone, whichever one the environment was made from.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(repository.root), os.environ.get("PYTHONPATH")])
        ),
    }


def _no_proxy() -> dict[str, str]:
    """A proxy of the network knows nothing of this machine's loopback."""
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _port(console: Console, what: str, asked: int | None, default: int) -> int:
    """The port asked for, which must be free, or the default one, or any that is free."""
    if asked is not None:
        if not _is_free(asked):
            raise LockstepError(f"port {asked} for {what} is taken; choose another one")
        return asked
    if _is_free(default):
        return default
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    console.line(f"port {default} is taken, so {what} uses {port}")
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
    """Until all of them answer; the log is the error of one that does not."""
    while starting := [server for server in starting if not ready(server)]:
        taken = time.monotonic() - begun
        names = " and ".join(server.name for server in starting)
        console.progress(f"waiting for {names} ({seconds(taken)})")
        for server in starting:
            if not server.lives:
                raise LockstepError(f"{server.name} did not start:\n{_tail(server)}")
        if taken > START_LIMIT_S:
            raise LockstepError(
                f"{starting[0].name} does not answer after {seconds(taken)}:\n{_tail(starting[0])}"
            )
        time.sleep(POLL_S)


def _is_well(server: Server) -> bool:
    path = "/api/health" if server.name == "prefect" else "/health"
    return prefect_api.answers(server.url + path)


def _tail(server: Server) -> str:
    lines = redact(Path(server.log).read_text(errors="replace", encoding="utf-8")).splitlines()[
        -LOG_TAIL:
    ]
    return "".join(f"  | {line}\n" for line in lines) + f"full log: {server.log}"


def _deploy(repository: Repository, prefect: Server, schedules: bool) -> None:
    done = subprocess.run(
        _prefect("deploy", "--all", "--prefect-file", PREFECT_FILE),
        cwd=repository.root,
        env=_environment(repository, prefect.api),
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
    prefect_api.set_schedules(prefect.api, active=schedules)


def _cancel_flow_runs(prefect: Server, worker: Server, console: Console) -> None:
    """Ask Prefect to cancel what runs, so that it ends as Cancelled with its jobs gone."""
    try:
        runs = prefect_api.open_flow_runs(prefect.api)
        for run in runs:
            console.line(f"cancelling flow run {run['name']}")
            prefect_api.cancel_flow_run(prefect.api, run["id"])
        deadline = time.monotonic() + CANCEL_LIMIT_S
        while runs and psutil.Process(worker.pid).children() and time.monotonic() < deadline:
            console.progress("waiting for its jobs to end")
            time.sleep(POLL_S)
    except (OSError, psutil.NoSuchProcess):
        console.line("the Prefect server does not answer; ending its flow runs without it")


def _say_addresses(repository: Repository, console: Console) -> None:
    servers = running(repository)
    console.line(f"MLflow   {servers['mlflow'].url}   runs, metrics, comparison")
    console.line(f"Prefect  {servers['prefect'].url}   flow runs, logs, schedules")
    active = [
        item for item in prefect_api.deployments(servers["prefect"].api) if not item["paused"]
    ]
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
        f"run one now:  PREFECT_API_URL={servers['prefect'].api} "
        f"prefect deployment run lockstep/{first}"
    )
    console.line("stop them:    lockstep down")


def _note(repository: Repository) -> Path:
    return _home(repository) / "servers.json"


def _write_note(repository: Repository, servers: dict[str, Server]) -> None:
    """At each start, so that a killed `up` leaves nothing that `down` does not know of."""
    noted = {name: asdict(server) for name, server in servers.items()}
    if "prefect" in noted:
        noted["prefect"]["api_url"] = servers["prefect"].api
    atomic.write_json(_note(repository), noted)


def _home(repository: Repository) -> Path:
    """Shared by the clones that `dvc exp run --temp` makes inside this one."""
    return repository.shared_home
