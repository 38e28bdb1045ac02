"""Runs attacks against a small world of its own, and says what came of each.

python attack.py KIND HOW NAME... prints a JSON object: for each program what escaped (nothing, one
hopes), how it ended, how long it took, and the most memory and processes it had at a time. HOW is
`program`, or `session` for code that a session executes. It needs the standard library only, so
that it can run as another user, with another Python.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from stages.rewards.sandbox.run import run_program  # noqa: E402
from stages.rewards.sandbox.session import Session  # noqa: E402
from stages.rewards.sandbox.values import (  # noqa: E402
    IsolationKind,
    Limits,
    ProgramResult,
    Status,
)
from tests.sandbox.programs import BURNERS, HEADER, PROGRAMS, SLEEPERS  # noqa: E402

LIMITS = Limits(cpu_s=1, wall_s=120, memory_mb=192, processes=8, file_mb=16, output_kb=64)
BURN_S = 0.5
"""Of a processor, for programs that take what they may have of it."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class World:
    """What an attacker would like to reach."""

    folder: Path
    nonce: str = field(default_factory=lambda: f"nonce{secrets.token_hex(8)}")
    visits: list[str] = field(default_factory=list)
    """Connections and signals that arrived."""

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    def contents(self) -> dict[str, bytes | None]:
        return {
            path.name: path.read_bytes() if path.is_file() else None
            for path in sorted(self.folder.iterdir())
        }


@contextlib.contextmanager
def a_world() -> Iterator[tuple[World, dict[str, object]]]:
    """A secret in a file and in the environment, servers that note who calls, signal handlers."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        world = World(Path(name).resolve())
        world.folder.chmod(0o755)
        world.secret.write_text(world.nonce)
        world.secret.chmod(0o666)
        os.environ["SECRET"] = world.nonce
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda number, _: world.visits.append(f"signal {number}"))

        def listen(family: int, kind: int, address: object) -> object:
            server = servers.enter_context(socket.socket(family, kind))
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen()
            take = server.accept if kind == socket.SOCK_STREAM else lambda: server.recvfrom(10)

            def note() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        take()
                        world.visits.append(f"a visitor at {address!r}")

            threading.Thread(target=note, daemon=True).start()
            return server.getsockname()

        tcp = listen(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0))
        udp = listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        listen(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{world.nonce}")
        listen(socket.AF_UNIX, socket.SOCK_STREAM, str(world.folder / "socket"))
        (world.folder / "socket").chmod(0o777)
        yield (
            world,
            {
                "secret": str(world.secret),
                "folder": str(world.folder),
                "unix": str(world.folder / "socket"),
                "nonce": world.nonce,
                "project": str(ROOT),
                "home": str(Path.home()),
                "packages": [path for path in sys.path if path.endswith("-packages")],
                "pid": os.getpid(),
                "port": tcp[1],
                "udp": udp[1],
                "address": _own_address(),
                "host": os.uname().nodename,
            },
        )


def _own_address() -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


class Watch(threading.Thread):
    """The most memory and processes that this process had below it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.memory_mb = 0.0
        self.processes = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.02):
            found = below(os.getpid())
            self.processes = max(self.processes, len(found))
            self.memory_mb = max(self.memory_mb, sum(found.values()) * _PAGE / 1e6)

    def stop(self) -> None:
        self._done.set()
        self.join()


def below(pid: int) -> dict[int, int]:
    """The resident pages of each descendant."""
    parents, pages = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                pages[int(entry.name)] = int(fields[21])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: pages[child] for child in found - {pid}}


def survivors(nonce: str) -> list[int]:
    """Processes anywhere that an attack started and named after the nonce."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if nonce.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def run_in_session(source: str, line: bytes, limits: Limits, kind: IsolationKind) -> ProgramResult:
    """As a program; the line that it would read is part of the code, since a session has none."""
    session = Session(0, limits, kind)
    try:
        done = session.execute(source.replace("sys.stdin.readline()", repr(line.decode())))
    finally:
        session.close()
    return ProgramResult(done.ended or Status.FINISHED, None, done.text, "")


def attack(name: str, kind: IsolationKind, *, in_session: bool) -> dict[str, object]:
    """Run one program, and look at the world afterwards."""
    with a_world() as (world, targets):
        before = world.contents()
        line = json.dumps(targets).encode() + b"\n"
        padding = b"x" * (1 << 23) if name == "does not read its input" else b""
        watch = Watch()
        watch.start()
        start = time.monotonic()
        try:
            limits = replace(LIMITS, wall_s=1) if name in SLEEPERS else LIMITS
            limits = replace(limits, cpu_s=BURN_S) if name in BURNERS else limits
            source = HEADER + PROGRAMS[name]
            if in_session:
                done = run_in_session(source, line, limits, kind)
            else:
                done = run_program(source, line + padding, limits=limits, kind=kind)
        finally:
            seconds = time.monotonic() - start
            watch.stop()
        escaped = [line for line in done.stdout.splitlines() if line.startswith("ESCAPED")]
        if world.nonce in done.stdout + done.stderr:
            escaped.append("the secret is in its output")
        if world.contents() != before:
            escaped.append("files outside were changed")
        time.sleep(0.05)
        escaped += [f"outside: {visit}" for visit in world.visits]
        for pid in survivors(world.nonce):
            escaped.append("a process lives on")
            os.kill(pid, signal.SIGKILL)
        return {
            "escaped": escaped,
            "status": done.status,
            "exit_code": done.exit_code,
            "stdout": done.stdout[-500:],
            "stderr": done.stderr[-500:],
            "seconds": seconds,
            "memory_mb": watch.memory_mb,
            "processes": watch.processes,
        }


if __name__ == "__main__":
    kind, how, *names = sys.argv[1:]
    in_session = how == "session"
    found = {name: attack(name, IsolationKind(kind), in_session=in_session) for name in names}
    print(json.dumps(found))
