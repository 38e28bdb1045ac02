"""A real Slurm cluster on this machine: munged, slurmctld and a few slurmd on loopback.

    python tools/slurm_cluster.py up        start it, or what is missing of it
    python tools/slurm_cluster.py env       the variable that points Slurm's commands at it
    python tools/slurm_cluster.py down      cancel its jobs and stop it

It needs Debian's or Ubuntu's packages (`install` fetches them, as root), no systemd, no cgroups and
no root. Its nodes and GPUs are emulated, so it shows how jobs fare, not how fast they are.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from slurm_conf import Layout, cgroup_conf, gres_conf, slurm_conf

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".slurm-dev"
LONGEST_SOCKET = 107
PORT_PATIENCE_S = 5.0
MAX_JOB, MAX_STEP = 67_043_328, 4_294_967_291
"""The largest numbers that Slurm makes socket names of."""


class ClusterError(Exception):
    """The message says what is in the way, and what to do about it."""


class Cluster:
    """One cluster, in one folder."""

    longest_s = 30.0
    """How long a daemon may take to come up, and a command of Slurm's to answer."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.folder = layout.folder

    @classmethod
    def at(cls, folder: Path) -> "Cluster":
        """The cluster that was started in this folder."""
        path = folder / "cluster.json"
        if not path.exists():
            raise ClusterError(f"{folder}: no cluster was started here; run `up` first")
        return cls(Layout(**{**json.loads(path.read_text(encoding="utf-8")), "folder": folder}))

    @property
    def environment(self) -> dict[str, str]:
        """What makes Slurm's commands, and submitit, talk to this cluster."""
        return {"SLURM_CONF": str(self.layout.conf)}

    def run(self, *words: str, check: bool = True, timeout: float | None = None) -> str:
        """Run one of Slurm's commands against it."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout or self.longest_s,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def up(self) -> None:
        """Start what does not run; a cluster that does is left as it is."""
        _check_programs()
        address = _loopback_address()
        name = self.layout.names[0]
        longest = f"{self.folder}/spool/{name}/{name}_{MAX_JOB}.{MAX_STEP}"
        if len(longest) > LONGEST_SOCKET:
            raise ClusterError(
                f"{self.folder}: the path is {len(longest) - LONGEST_SOCKET} characters too long "
                "for the sockets in it; choose a shorter one with --folder"
            )
        if not self._pid("slurmctld.pid", "slurmctld"):
            _check_port(self.layout.port)
        self._write_files(address)
        self._start_munge()
        self.start_controller()
        for name in self.layout.names:
            self.start_node(name)
        self._wait(self._ready, "the nodes")

    def down(self) -> None:
        """End its jobs and stop its daemons; what it knows of jobs is kept for the next start."""
        if self._pid("slurmctld.pid", "slurmctld"):
            self.cancel_all()
        else:
            for name in self.layout.names:
                self.kill_node(name)
        # The controller first: without nodes it would wait for them.
        for name in ("slurmctld.pid", *(f"slurmd.{node}.pid" for node in self.layout.names)):
            self._stop(name, name.split(".")[0])
        self._stop("munged.pid", "munged")

    def cancel_all(self) -> None:
        """End every job, and wait until none is left."""
        self.run("scancel", "--user", str(os.getuid()), check=False)
        deadline = time.monotonic() + self.longest_s
        while self.run("squeue", "--noheader", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)

    def start_controller(self) -> None:
        if not self._pid("slurmctld.pid", "slurmctld"):
            self._start("slurmctld", "-f", str(self.layout.conf))
        self._wait(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld")

    def kill_controller(self) -> None:
        self._kill("slurmctld.pid", "slurmctld")

    def start_node(self, name: str) -> None:
        (self.folder / "spool" / name).mkdir(parents=True, exist_ok=True)
        file = f"slurmd.{name}.pid"
        if not self._pid(file, "slurmd"):
            self._start("slurmd", "-f", str(self.layout.conf), "-N", name)
            # Its command returns before it has said who it is.
            self._wait(lambda: self._pid(file, "slurmd") is not None, f"slurmd of {name}")

    def kill_node(self, name: str) -> None:
        """As if the machine had lost power: its daemon and all its jobs' processes are gone."""
        self._kill(f"slurmd.{name}.pid", "slurmd")
        doomed: set[int] = set()
        marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.layout.conf}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if marks <= set((process / "environ").read_bytes().split(b"\0")):
                    doomed.add(int(process.name))
                    parent = _parent(process)
                    if parent.name != "1" and "slurmstepd" in (parent / "comm").read_text(
                        encoding="utf-8"
                    ):
                        doomed.add(int(parent.name))
            except OSError:
                continue
        # All at once: none may live to tell how another died.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _write_files(self, address: str) -> None:
        for name in ("etc", "log", "run", "state", "spool", "dev", "munge"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(self.layout.gpus):
            device = self.folder / "dev" / f"nvidia{number}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")
        key = self.folder / "munge" / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(1024))
        first = self.folder / "first_job"
        if not first.exists():
            first.write_text(str(int(time.time()) % 50_000_000 + 1000), encoding="utf-8")
        etc = self.layout.conf.parent
        self.layout.conf.write_text(
            slurm_conf(self.layout, address, int(first.read_text(encoding="utf-8"))),
            encoding="utf-8",
        )
        (etc / "gres.conf").write_text(gres_conf(self.layout), encoding="utf-8")
        (etc / "cgroup.conf").write_text(cgroup_conf(), encoding="utf-8")
        values = {**asdict(self.layout), "folder": str(self.folder)}
        (self.folder / "cluster.json").write_text(json.dumps(values, indent=2), encoding="utf-8")

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        if not self._pid("munged.pid", "munged"):
            for left in ("socket", "socket.lock"):
                (munge / left).unlink(missing_ok=True)
            options = {
                "key-file": munge / "key",
                "socket": munge / "socket",
                "seed-file": munge / "seed",
                "pid-file": self.folder / "run" / "munged.pid",
                "log-file": self.folder / "log" / "munged.log",
            }
            words = [f"--{name}={value}" for name, value in options.items()]
            self._start("munged", "--force", "--num-threads=2", *words)
        self._wait((munge / "socket").exists, "munged")

    def _ready(self) -> bool:
        """Whether every node may take jobs; one that Slurm drained is given back."""
        states = self.run("sinfo", "--noheader", "-N", "-o", "%N %t", check=False)
        nodes = dict(line.split() for line in states.splitlines())
        drained = [name for name, state in nodes.items() if state.startswith(("drain", "drng"))]
        for name in drained:
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        good = ("idle", "mix", "alloc", "comp")
        # `idle*` is a node that does not answer.
        return len(nodes) == self.layout.nodes and all(state in good for state in nodes.values())

    def _start(self, *words: str) -> None:
        program = _find(words[0])
        log = self.folder / "log" / f"{words[0]}.start"
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(
                [program, *words[1:]],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                check=False,
            )
        if done.returncode:
            raise ClusterError(
                f"{words[0]} did not start:\n{log.read_text(encoding='utf-8')}{self._log_tail()}"
            )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.longest_s
        while True:
            is_late = time.monotonic() > deadline
            if condition():
                return
            if is_late:
                break
            time.sleep(0.05)
        raise ClusterError(f"{what} did not come up in {self.longest_s:.0f} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        logs = sorted((self.folder / "log").glob("*.log"))
        lines = [f"{log.name}: {line}" for log in logs for line in _last_lines(log, 5)]
        return "\n".join(lines)

    def _pid(self, file: str, program: str) -> int | None:
        """The process that a pid file names, if it lives and is what the file says."""
        try:
            pid = int((self.folder / "run" / file).read_text(encoding="utf-8"))
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        alive = not fields["State"].startswith(("Z", "X"))
        return pid if alive and fields["Name"].startswith(program) else None

    def _stop(self, file: str, program: str) -> None:
        pid = self._pid(file, program)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while self._pid(file, program) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill(file, program)

    def _kill(self, file: str, program: str) -> None:
        pid = self._pid(file, program)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            while self._pid(file, program):
                time.sleep(0.02)


def _check_programs() -> None:
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not _find(name)]
    if missing:
        raise ClusterError(
            f"{', '.join(missing)} not found; on Debian or Ubuntu: sudo apt-get install "
            f"--no-install-recommends {' '.join(PACKAGES)}"
        )


def _check_port(port: int) -> None:
    """Refuse a port of somebody else's; a killed daemon's own is free only a moment later."""
    deadline = time.monotonic() + PORT_PATIENCE_S
    while not _is_free(port):
        if time.monotonic() > deadline:
            raise ClusterError(f"port {port} is taken; choose another with --port")
        time.sleep(0.1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _find(program: str) -> str:
    """Daemons lie where users do not look."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return shutil.which(program, path=path) or ""


def _loopback_address() -> str:
    host = socket.gethostname().split(".")[0]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    if not address.startswith("127."):
        raise ClusterError(
            f"this machine's name {host!r} stands for {address}, and the cluster must stay on "
            f"loopback: add the line `127.0.0.1 {host}` to /etc/hosts"
        )
    return address


def _parent(process: Path) -> Path:
    status = (process / "stat").read_text(encoding="utf-8")
    return process.parent / status.rpartition(")")[2].split()[1]


def _last_lines(path: Path, count: int) -> list[str]:
    return path.read_text(errors="replace", encoding="utf-8").splitlines()[-count:]


def install() -> None:
    """Fetch the packages."""
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise ClusterError(f"needs root and apt-get; the packages are {' '.join(PACKAGES)}")
    apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(apt, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["up", "down", "env", "status", "install"])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where it lives")
    parser.add_argument("--port", type=int, default=16817, help="first of its ports")
    parser.add_argument("--nodes", type=int, default=4, help="emulated nodes")
    parser.add_argument("--gpus", type=int, default=4, help="fake GPUs of each node but the last")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.resolve()
    try:
        if chosen.command == "install":
            install()
            return 0
        if chosen.command == "up":
            cluster = Cluster(
                Layout(folder, port=chosen.port, nodes=chosen.nodes, gpus=chosen.gpus)
            )
            if (folder / "cluster.json").exists() and Cluster.at(folder).layout != cluster.layout:
                Cluster.at(folder).down()
            cluster.up()
            print(cluster.run("sinfo"))
            print(f"export SLURM_CONF={cluster.layout.conf}")
            print("lockstep run --profile slurm-dev")
            return 0
        cluster = Cluster.at(folder)
        if chosen.command == "down":
            cluster.down()
        elif chosen.command == "env":
            print(f"export SLURM_CONF={cluster.layout.conf}")
        else:
            print(cluster.run("sinfo") + cluster.run("squeue"))
    except ClusterError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
