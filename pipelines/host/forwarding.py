"""Ports of the host's loopback that are reached at ports of this machine's loopback."""

import http.client
import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from pipelines.base.browser import open_browser
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.host.ssh import Connection

HOST = "127.0.0.1"
ANSWER_S = 60.0
_LINK = re.compile(rf"http://{re.escape(HOST)}:(\d+)/#token=\S+")


class Forwarding:
    """The ports that are forwarded, until the block ends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ports: dict[int, int] = {}
        """Of there, and of here."""

    def __enter__(self) -> "Forwarding":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for there, here in self.ports.items():
            self.connection.forward(here, there, end=True)

    def to(self, there: int) -> int:
        """The port here that leads to one there: the same number where it is free."""
        if there not in self.ports:
            here = _free_port(there)
            self.connection.forward(here, there)
            self.ports[there] = here
            if not _answers(here):
                raise LockstepError(
                    f"port {there} of {self.connection.host.address} cannot be reached: its sshd "
                    "may forbid forwarding (AllowTcpForwarding), or nothing listens there"
                )
        return self.ports[there]


def say_servers(forwarding: Forwarding, console: Console) -> None:
    """Forward what `lockstep up` has started there, and say where to find it here."""
    connection, host = forwarding.connection, forwarding.connection.host
    servers = json.loads(connection.read(connection.in_folder("cat .lockstep/servers.json")))
    console.line("here, through ssh, until Ctrl-C (the servers go on):")
    for name, title in (("mlflow", "MLflow"), ("prefect", "Prefect"), ("ui", "pages")):
        port = urlsplit(servers[name]["url"]).port
        console.line(f"{title:<8} http://{HOST}:{forwarding.to(port or 80)}")
    console.line(f"their password: {host.by_hand('cat .lockstep/servers.password')}")
    console.line("the link of the pages: lockstep ui, with the same host")


def show_pages(forwarding: Forwarding, output: IO[str], page: Path | None) -> None:
    """Print what `lockstep ui` says there, with its link as it is here; `page` is to open it by."""
    for line in output:
        link = _LINK.search(line)
        if link:
            here = forwarding.to(int(link[1]))
            ours = link[0].replace(f":{link[1]}/", f":{here}/", 1)
            line = line.replace(link[0], ours)
            if page is not None:
                open_browser(page, ours)
        print(line, end="", flush=True)


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise LockstepError(f"no port of {HOST} is free")


def _answers(port: int) -> bool:
    """Whether any answer comes; without a server at the other end, ssh closes the connection."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except TimeoutError:
        return True  # slow, but there
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
