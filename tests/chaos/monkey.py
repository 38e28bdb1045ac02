"""A monkey that kills processes of a running pipeline with -9, and looks at what is left.

What it kills and when is drawn from a seed: some of the moments at random, most of them right after
a file has appeared or changed, for that is when the windows are open. The seed fixes the draws, not
the timing of the machine, so the same seed is the same plan and not the same run. Every kill is
noted, and the notes are what a failing test shows.
"""

import fcntl
import hashlib
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import TIMEOUT_S

SEED_VARIABLE, KILLS_VARIABLE = "LOCKSTEP_CHAOS_SEED", "LOCKSTEP_CHAOS_KILLS"
AFTER_EVENT_S = 0.04
LONGEST_RUN_S = 900.0
FROM_A_SESSION = 2.0
"""How much longer the small pipeline takes with a process for each stage than in a session."""
POLL_S = 0.002
_TORN = re.compile(
    r"dvc\.lock', YAML file|dvc\.lock' validation failed|Unable to read RWLock|not 'NoneType'"
    r"|dvc\.lock cannot be read"
)
"""What is said of DVC's own files after a kill; `NoneType` of a run cache with an empty folder."""
_ENTRY = ".lockstep/jobs/*/[!.]*"
EVENTS = {
    "an entry": _ENTRY,
    "an attempt": f"{_ENTRY}/attempts/*",
    "its launch.json": f"{_ENTRY}/attempts/*/launch.json",
    "its worker.json": f"{_ENTRY}/attempts/*/worker.json",
    "a checkpoint being written": f"{_ENTRY}/scratch/.checkpoint-*",
    "a checkpoint": f"{_ENTRY}/scratch/checkpoint-*",
    "outputs being written": f"{_ENTRY}/out.*",
    "outputs": f"{_ENTRY}/out",
    "its result.json": f"{_ENTRY}/attempts/*/result.json",
    "publishing": f"{_ENTRY}/publishing",
    "its record.json": f"{_ENTRY}/record.json",
    "its run in MLflow": f"{_ENTRY}/tracking.json",
    "dvc.lock": "dvc.lock",
    "DVC's cache": ".dvc/cache/files/md5/*",
    "DVC's run cache": ".dvc/cache/runs/*",
}
"""What the monkey waits for: names that appear or change."""


def the_seed() -> int:
    """The seed of this session, from the environment or fresh; printed, for the next try."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(10**9))
    print(f"{SEED_VARIABLE}={seed}")
    return seed


def number_of_kills(usual: int) -> int:
    return int(os.environ.get(KILLS_VARIABLE) or usual)


def rounds(kills: int, most: int) -> list[int]:
    """The kills of each round, each in a clone of its own."""
    return [min(most, kills - done) for done in range(0, kills, most)]


def pace_of(peaceful: Path, kills: int) -> float:
    """A pace that spreads the kills over the pipeline, by how long a session took here in peace.

    Much of what a kill destroys is done again, so the more kills, the longer the pipeline takes.
    """
    took = FROM_A_SESSION * float((peaceful.parent / "seconds").read_text())
    return max(2.0, (1 + kills / 8) * took / kills)


def role_of(process: psutil.Process) -> str | None:
    """What part a process plays, by its command line; None for what is none of ours."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    line = " ".join(words)
    if "pipelines.warm.server" in line:
        return "warm"
    if "pipelines.export.shipping" in line:
        return "shipper"
    if "submitit" in line or "pipelines.worker.worker" in line:
        return "worker"
    if "pipelines stage" in line:
        return "driver"
    if any(Path(word).name == "dvc" for word in words[:2]) or words[1:3] == ["-m", "dvc"]:
        return "dvc"
    if any(Path(word).name == "lockstep" for word in words[:2]):
        return "runner"
    return None


@dataclass(frozen=True)
class Kill:
    """One kill, for the notes."""

    at: float
    what: str
    when: str
    victims: tuple[str, ...]
    progress: str

    def __str__(self) -> str:
        return f"{self.at:7.1f} s  {self.what:<8} {self.when:<34} {self.progress}  {self.victims}"


@dataclass
class Monkey:
    """Runs one command again and again, and kills what it started."""

    clone: Any
    seed: int
    kills_left: int
    pace: float
    """The longest time between two kills: the whole pipeline is to get its share of them."""
    number: int = 0
    """Of the round: each draws others from the same seed."""
    roles: tuple[str, ...] = ("worker", "driver", "dvc", "runner", "shipper", "warm", "all")
    more: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """What else may be killed: by name, how."""
    notes: list[Kill] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.number}")
        self.began = time.monotonic()

    def torment(self, *command: str, other: tuple[str, ...] = ()) -> None:
        """Start the command until it ends well with no kill left; kill in the meantime.

        Given another one, it is drawn each time which of the two is started.
        """
        noted_before, noted = 0, 0
        while True:
            noted_before, noted = noted, len(self.notes)
            self.command = self.random.choice([command, other]) if other else command
            if self.command[0] == "dvc":
                self._wait_for_dvc()
            process = self.clone.start(*self.command)
            reader = _drain(process)
            while self.kills_left and process.poll() is None:
                self._kill_once(process)
            try:
                process.wait(LONGEST_RUN_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(self.story("the command hangs")) from None
            self.outputs.append(f"$ {' '.join(self.command)}\n{reader()}")
            if process.returncode == 0:
                return
            self._wait_for_the_dead()
            # A job that was killed under the last command may die under this one.
            attached = "its job still runs" in self.outputs[-1]
            disturbed = len(self.notes) > (noted_before if attached else noted)
            if not disturbed and not self._repaired(self.outputs[-1]):
                raise AssertionError(self.story(f"undisturbed, it ended with {process.returncode}"))

    def _wait_for_dvc(self) -> None:
        """`lockstep run` waits for what a killed one left running; DVC itself refuses to run."""
        deadline = time.monotonic() + LONGEST_RUN_S
        while "dvc" in self._living() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _repaired(self, output: str) -> bool:
        """DVC does not read its own files where a kill tore them; one command puts them right."""
        if self.command[0] != "dvc" or not _TORN.search(output):
            return False
        self.outputs.append(self.clone.run("lockstep", "record").stdout)
        return True

    def _wait_for_the_dead(self) -> None:
        """DVC's locks count a process as living until the system has forgotten it."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(psutil.pid_exists(pid) for pid in self.killed) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.killed.clear()

    def story(self, problem: str) -> str:
        """What happened, for whoever has to find out why."""
        kills = "\n".join(map(str, self.notes))
        last = "\n--- next run ---\n".join(output[-3000:] for output in self.outputs[-3:])
        return (
            f"{problem}\n{SEED_VARIABLE}={self.seed}, round {self.number}, "
            f"{len(self.notes)} kills:\n{kills}\n"
            f"--- the last outputs ---\n{last}"
        )

    def _kill_once(self, process: subprocess.Popen[str]) -> None:
        """Wait for a moment, then kill; nothing happens where the command ends before that."""
        when = self._wait_for_moment(process)
        if process.poll() is not None:
            return
        living = self._living()
        names = [role for role in self.roles if role == "all" or role in living] + list(self.more)
        what = self.random.choice(names)
        progress = self._progress()
        victims: list[str] = []
        if what in self.more:
            victims.append(str(self.more[what]()))
        else:
            chosen = (
                [one for group in living.values() for one in group]
                if what == "all"
                else self._some(living[what])
            )
            for victim in chosen:
                try:
                    words = " ".join(victim.cmdline()[1:])[-60:]
                    victim.kill()
                    self.killed.add(victim.pid)
                    victims.append(f"{victim.pid} {words}")
                except psutil.NoSuchProcess:
                    continue
        if victims:
            self.kills_left -= 1
            at = time.monotonic() - self.began
            self.notes.append(Kill(at, what, when, tuple(victims), progress))

    def _some(self, group: list[psutil.Process]) -> list[psutil.Process]:
        """One of them, or all: a worker has a process above it that watches it."""
        return group if self.random.random() < 0.5 else [self.random.choice(group)]

    def _living(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {}
        for process in self.clone.with_servers():
            role = role_of(process)
            if role is not None:
                found.setdefault(role, []).append(process)
        return found

    def _wait_for_moment(self, process: subprocess.Popen[str]) -> str:
        if self.random.random() < 0.3:
            pause = self.random.uniform(0, self.pace)
            _sleep(pause, process)
            return f"after {pause:.2f} s"
        name = self.random.choice(list(EVENTS))
        late = self.random.uniform(0, AFTER_EVENT_S) * self.random.choice([0, 1])
        root, pattern = self.clone.root, EVENTS[name]
        before, deadline = _seen(root, pattern), time.monotonic() + self.pace
        while time.monotonic() < deadline and process.poll() is None:
            if _seen(root, pattern) - before:
                time.sleep(late)
                return f"{name} + {late * 1000:.0f} ms"
            time.sleep(POLL_S)
        return f"no {name} came"

    def _progress(self) -> str:
        """Which stages are at work, and how far."""
        shown = []
        for path in self.clone.root.glob(f"{_ENTRY}/attempts"):
            if not (path.parent / "record.json").exists():
                try:
                    progress = json.loads((path.parent / "progress.json").read_text())
                    far = f"{progress['done']}/{progress['total']}"
                except (OSError, ValueError):
                    far = "begins"
                shown.append(f"{path.parent.parent.name} {far}")
        return ", ".join(shown) or "between stages"


def _drain(process: subprocess.Popen[str]) -> Callable[[], str]:
    """Read the command's output as it comes, so that a full pipe never stops it."""
    import threading

    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        lines.extend(process.stdout)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def text() -> str:
        # What a killed command started may hold the pipe for longer than anybody wants to wait.
        thread.join(5)
        deadline = time.monotonic() + TIMEOUT_S
        while thread.is_alive() and _unread(process) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return "".join(lines)

    return text


def _unread(process: subprocess.Popen[str]) -> int:
    """Bytes of its output that wait in the pipe."""
    assert process.stdout is not None
    left = fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4))
    return int.from_bytes(left, sys.byteorder)


def _sleep(seconds: float, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)


def _seen(root: Path, pattern: str) -> set[tuple[str, int, int]]:
    found = set()
    # A folder may go while it is looked through.
    with suppress(FileNotFoundError):
        for path in root.glob(pattern):
            with suppress(OSError):
                stat = path.stat()
                found.add((str(path), 0 if path.is_dir() else stat.st_mtime_ns, stat.st_ino))
    return found


def results(root: Path) -> dict[str, str]:
    """The hash of every file that the pipeline has made, and of dvc.lock."""
    files = [root / "dvc.lock"]
    files += [
        path
        for folder in ("artifacts", "metrics")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and path.name != ".gitignore" and not _is_dvcs_own(path, root)
    ]
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _is_dvcs_own(path: Path, root: Path) -> bool:
    """Whether it is a file that DVC tries links with, beside an output and never in one."""
    beside = path.parent in (root / "artifacts", root / "metrics")
    named = re.fullmatch(r"\.[\w-]{22}\.tmp", path.name)
    return beside and named is not None and path.read_bytes() == b"test"


def leftovers(root: Path) -> list[str]:
    """What only a process that is still at work may have there."""
    ledger = root / ".lockstep"
    found: Iterable[Path] = [
        *ledger.glob("jobs/*/*/out.*"),
        *ledger.glob("jobs/*/*/publishing"),
        *ledger.glob("jobs/*/*/scratch"),
        *ledger.glob("jobs/*/.*"),
        *ledger.rglob("*.tmp"),
        *(path for path in (root / "artifacts").rglob(".*") if path.name != ".gitignore"),
        *(path for path in (root / "metrics").rglob(".*") if path.name != ".gitignore"),
        *(root / ".dvc/cache").rglob("*.tmp"),
        *(root / ".dvc/cache").rglob(".*"),
    ]
    return sorted({path.relative_to(root).as_posix() for path in found})


def wait_for_quiet(clone: Any) -> list[str]:
    """Until no process works in the clone: the shipper ends by itself. What is left at the end."""
    deadline = time.monotonic() + TIMEOUT_S
    while (left := clone.command_lines()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(words) for words in left.values()]


Curve = dict[tuple[str, int], list[float]]
"""The values of each metric at each step: one, if all is well."""


def stage_runs(root: Path) -> list[tuple[str, str, Curve]]:
    """Every stage run in MLflow's store: address, status and metrics."""
    with sqlite3.connect(root / ".lockstep/mlflow.db") as database:
        rows = database.execute(
            "select r.run_uuid, r.status, a.value from runs r"
            " join tags k on k.run_uuid = r.run_uuid"
            " and k.key = 'lockstep.kind' and k.value = 'stage'"
            " join tags a on a.run_uuid = r.run_uuid and a.key = 'lockstep.address'"
        ).fetchall()
        return [(address, status, _curve(database, run)) for run, status, address in rows]


def _curve(database: sqlite3.Connection, run: str) -> Curve:
    found: Curve = {}
    # What it took is another matter each time, and has a step for each attempt.
    query = "select key, step, value from metrics where run_uuid = ? and key not like 'cost/%'"
    for key, step, value in database.execute(query, (run,)):
        # How fast it went is another matter each time; that it is there once is not.
        found.setdefault((key, step), []).append(0.0 if key.endswith("per_second") else value)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """The keys under which two mappings differ."""
    for key in sorted({*one, *other}, key=str):
        if one.get(key) != other.get(key):
            yield f"{key}: {one.get(key)} != {other.get(key)}"
