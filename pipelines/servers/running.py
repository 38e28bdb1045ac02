"""The processes that `lockstep up` started in a clone, as `.lockstep/servers.json` lists them.

A process counts only while it is alive: the number of one that has ended may be another's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.processes import process_lives
from pipelines.base.repository import Repository

NAMES = ("mlflow", "prefect", "ui", "worker")
"""In the order of their start."""


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


def running(repository: Repository) -> dict[str, Server]:
    """The running servers of this clone, by name: mlflow, prefect, ui, worker."""
    noted = atomic.read_json(note_of(repository)) or {}
    servers = {
        name: Server(name, **{key: values[key] for key in ("url", "pid", "pid_started", "log")})
        for name, values in noted.items()
    }
    return {name: server for name, server in servers.items() if server.lives}


def note_of(repository: Repository) -> Path:
    return repository.shared_home / "servers.json"


def write_note(repository: Repository, servers: Mapping[str, Server]) -> None:
    """At each start, so that `down` knows of everything that a killed `up` started."""
    noted = {name: asdict(server) for name, server in servers.items()}
    if "prefect" in noted:
        noted["prefect"]["api_url"] = servers["prefect"].api
    atomic.write_json(note_of(repository), noted)
