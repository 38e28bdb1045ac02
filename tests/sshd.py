"""A real sshd on loopback, with host keys, user keys and settings of its own in a folder."""

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.conftest import kill_each
from tests.ports import free_port
from tests.waiting import until

NAME = "cluster"
"""Of the host, in the user's settings."""
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin") or ""
PRIVILEGE_SEPARATION = Path("/run/sshd")


@dataclass(frozen=True)
class Sshd:
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def variables(self) -> dict[str, str]:
        """For commands here: the settings of ssh, and where their connections are."""
        settings = f"ssh -F {self.folder}/ssh_config"
        return {"GIT_SSH_COMMAND": settings, "XDG_RUNTIME_DIR": str(self.folder)}

    def log_in_anew(self) -> None:
        """End every connection, here and there, as a network does that goes away."""
        kill_each(self._logins())
        until(lambda: not self._clients(), "no connection is left here")

    def kill_clients(self) -> None:
        kill_each(self._clients())
        until(lambda: not self._clients(), "no connection is left here")

    def _logins(self) -> list[psutil.Process]:
        """The daemon's process of each, or its two; not what runs in them."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if process.name() == "sshd"]

    def _clients(self) -> list[psutil.Process]:
        ours = str(self.folder)
        found = []
        for process in psutil.process_iter(["name", "cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if process.info["name"] == "ssh" and ours in words:
                found.append(process)
        return [each for each in found if each.is_running() and each.status() != "zombie"]

    def end(self) -> None:
        kill_each(self._clients())
        kill_each(self._logins())
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(variables: dict[str, str]) -> Iterator[Sshd]:
    """An sshd whose logins have these variables; the folder is short: it holds sockets."""
    if not (SSHD and shutil.which("ssh") and shutil.which("ssh-keygen")):
        pytest.skip("needs sshd: apt-get install --no-install-recommends openssh-server")
    if os.getuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    folder, port = Path(tempfile.mkdtemp(prefix="ls-ssh-", dir="/tmp")), free_port()
    for key in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True)
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "SetEnv": " ".join(f'{name}="{value}"' for name, value in variables.items()) or 'A="b"',
    }
    _write(folder / "sshd_config", settings)
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    client = {
        "Host": NAME,
        "HostName": "127.0.0.1",
        "Port": port,
        "User": getpass.getuser(),
        "IdentityFile": folder / "user",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": folder / "known",
        "StrictHostKeyChecking": "yes",
    }
    _write(folder / "ssh_config", client)
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log, stdin=subprocess.DEVNULL
    )
    sshd = Sshd(folder, process)
    try:
        until(
            lambda: b"Server listening" in (folder / "log").read_bytes(),
            "sshd listens",
            otherwise=lambda: (folder / "log").read_text(),
            at_work=lambda: process.poll() is None,
        )
        yield sshd
    finally:
        sshd.end()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, settings: dict[str, object]) -> None:
    path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
