"""One connection over the user's own ssh, which all that a command does there shares.

So one login suffices, and a second factor is asked for once. All options are those of the user's
ssh settings; GIT_SSH_COMMAND, which git knows too, replaces `ssh`.
"""

import os
import shlex
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.host.address import HERE, VARIABLE, Host

PERSIST_S = 600
"""How long the connection stays for the next command."""
LOST = 255
"""The exit status of ssh where it is the connection that failed."""
_ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
"""A network that is gone is noticed after a minute."""
_LONGEST_SOCKET = 36
"""The longest folder: a socket's whole path may have 107 characters, of which ssh needs 71."""


@dataclass(frozen=True)
class Connection:
    host: Host
    words: tuple[str, ...]
    """`ssh` with its options."""

    def command(self, script: str, *options: str) -> list[str]:
        """The command line that has sh and then a login shell there run a script of one line.

        Modules and Slurm's commands may be on the path of login shells alone. What their start
        prints is kept from what the script prints.
        """
        login = f"exec bash -lc {shlex.quote(f'exec 1>&3 3>&-; {script}')}"
        outer = f"exec 3>&1 1>&2; {login}"
        shell = f"exec sh -c {shlex.quote(outer)}"
        return [*self.words, *options, "--", self.host.address, shell]

    def in_folder(self, script: str) -> str:
        """The script, in the clone's folder there; what is missing is said on standard error."""
        missing = f"there is no folder {self.host.name}: {self._how_to_begin()}"
        return f"cd {shlex.quote(self.host.folder)} 2>/dev/null || {fail(missing)}; {script}"

    def python(self, module: str, *words: str) -> str:
        """A script that runs a module of the clone there, with its environment's Python."""
        missing = (
            f"there is no {self.host.python} in {self.host.name}, the Python of its environment: "
            f"make it with `{self.host.by_hand('make venv', terminal=True)}`, or name another one "
            "with `git config lockstep.hostPython PATH`"
        )
        python = shlex.quote(self.host.python)
        passed = {VARIABLE: HERE} | {
            name: os.environ[name]
            for name in ("LOCKSTEP_PROFILE", "LOCKSTEP_TRACKING")
            if name in os.environ
        }
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in passed.items())
        run = f"{settings} exec {python} -m {shlex.join([module, *words])}"
        return self.in_folder(f"[ -x {python} ] || {fail(missing)}; {run}")

    def read(self, script: str) -> str:
        """What a script prints; LockstepError with its errors where it fails."""
        done = subprocess.run(
            self.command(script),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().removeprefix("lockstep: ")
            raise LockstepError(said or f"{self.host.name}: ended with {done.returncode}")
        return done.stdout

    @property
    def for_git(self) -> dict[str, str]:
        """The variables with which git uses this connection."""
        return {"GIT_SSH_COMMAND": shlex.join(self.words), "GIT_SSH_VARIANT": "ssh"}

    def forward(self, here: int, there: int, *, end: bool = False) -> None:
        """Have a port of loopback here lead to one of loopback there; with `end`, no longer."""
        ports = f"127.0.0.1:{here}:127.0.0.1:{there}"
        action = ["-O", "cancel" if end else "forward", "-L", ports, "--", self.host.address]
        done = subprocess.run([*self.words, *action], capture_output=True, text=True, check=False)
        if done.returncode and not end:
            raise LockstepError(f"port {there} of {self.host.address}: {done.stderr.strip()}")

    def _how_to_begin(self) -> str:
        folder = shlex.quote(self.host.folder)
        begin = f"ssh {shlex.quote(self.host.address)} {shlex.quote(f'git init -q {folder}')}"
        return f"make it with `{begin}`, then `lockstep plan` brings the files there"


def connect(host: Host) -> Connection:
    """Log in, or use the connection of an earlier command, or one of the user's own."""
    ssh = shlex.split(os.environ.get("GIT_SSH_COMMAND") or "ssh")
    if _is_up(ssh, host):
        return Connection(host, tuple(ssh))
    shared = [*ssh, "-o", f"ControlPath={_sockets()}/%C"]
    if not _is_up(shared, host):
        _log_in(shared, host)
    return Connection(host, (*shared, "-o", "ControlMaster=no", "-o", "BatchMode=yes"))


def _is_up(words: list[str], host: Host) -> bool:
    check = [*words, "-O", "check", "--", host.address]
    try:
        return not subprocess.run(check, capture_output=True, check=False).returncode
    except FileNotFoundError:
        raise LockstepError(f"there is no {words[0]} on this machine: install OpenSSH") from None


def _log_in(words: list[str], host: Host) -> None:
    """Passwords and second factors are asked for on the terminal, where there is one."""
    # `auto` also takes the place of a master that was killed and has left its socket behind.
    options = ["ControlMaster=auto", f"ControlPersist={PERSIST_S}", *_ALIVE]
    options += [] if sys.stdin.isatty() else ["BatchMode=yes"]
    settings = [word for option in options for word in ("-o", option)]
    # Some versions keep their standard error open for as long as the connection lasts.
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            [*words, *settings, "-f", "-N", "--", host.address],
            stdin=None if sys.stdin.isatty() else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            check=False,
        )
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if done.returncode:
        raise LockstepError(
            f"cannot log in to {host.address}: {said or f'ssh ended with {done.returncode}'}; "
            f"`ssh {shlex.quote(host.address)}` has to work first"
        )


def _sockets() -> Path:
    """A folder of this user alone: who has a socket of it is logged in there."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    fits = runtime.is_dir() and len(str(runtime)) < _LONGEST_SOCKET
    folder = runtime / "lockstep-ssh" if fits else Path(f"/tmp/lockstep-ssh-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not private:
        raise LockstepError(f"{folder}: must be a folder of yours that no one else can read")
    return folder


def fail(message: str) -> str:
    """A command of sh that ends the script with an error."""
    return f"{{ printf '%s\\n' {shlex.quote(f'lockstep: {message}')} >&2; exit 2; }}"
