"""The run of a clone that needs no connection: a process, its output and its end, in files.

`python -m pipelines.host.kept FOLDER WORDS` is that process. It has a session of its own, so that
the end of a login does not reach it, and holds a lock while it lives.
"""

import fcntl
import os
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic, console
from pipelines.base.locks import is_locked
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository

POLL_S = 0.05
MOST_KEPT = 5
"""Folders of ended runs."""


@dataclass(frozen=True)
class KeptRun:
    folder: Path

    @property
    def command(self) -> dict[str, Any]:
        """Its words, the profile of its variables, and when it began."""
        return atomic.load_json(self.folder / "command.json")  # type: ignore[no-any-return]

    @property
    def output(self) -> Path:
        return self.folder / "output.log"

    @property
    def progress(self) -> str:
        """The line that changes in place."""
        try:
            return (self.folder / "progress").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @property
    def lives(self) -> bool:
        return is_locked(self.folder / "alive")

    @property
    def status(self) -> int | None:
        """How it has ended, where it could say so."""
        ended = atomic.read_json(self.folder / "ended.json")
        return ended["status"] if ended else None

    @property
    def was_followed(self) -> bool:
        """Whether somebody has seen its end."""
        return (self.folder / "followed").exists()

    def note_followed(self) -> None:
        (self.folder / "followed").touch()

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on; one that comes before the process has begun is passed once it has."""
        noted = self.folder / "process.json"
        while self.lives and not noted.exists():
            time.sleep(POLL_S)
        if not self.lives:
            return
        process = atomic.load_json(noted)
        if process["host"] != atomic.here():
            # Its number is that of another process here.
            print(
                f"the run lives on {process['host']}, and {number.name} does not reach it from "
                f"{atomic.here()}: `lockstep cancel` cancels its jobs",
                file=sys.stderr,
                flush=True,
            )
            return
        with suppress(ProcessLookupError):
            os.kill(process["pid"], number)


def home_of(repository: Repository) -> Path:
    return repository.home / "host"


def latest(repository: Repository) -> KeptRun | None:
    folders = sorted(path.parent for path in home_of(repository).glob("*/command.json"))
    return KeptRun(folders[-1]) if folders else None


def start(repository: Repository, words: list[str], profile: str | None) -> KeptRun:
    """Start the process; it lives from the moment this returns."""
    _forget_old(repository)
    now = time.time()
    run = KeptRun(home_of(repository) / f"{now:018.6f}-{secrets.token_hex(3)}")
    run.folder.mkdir(parents=True)
    with (run.folder / "alive").open("a") as alive, open_log(run.output) as output:
        fcntl.flock(alive, fcntl.LOCK_EX)
        command = {"words": words, "profile": profile, "time": now}
        atomic.write_json(run.folder / "command.json", command)
        subprocess.Popen(
            [sys.executable, "-m", "pipelines.host.kept", str(run.folder), *words],
            cwd=repository.root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(alive.fileno(),),
            start_new_session=True,
        )
    return run


def _forget_old(repository: Repository) -> None:
    folders = sorted(path for path in home_of(repository).glob("*-*") if path.is_dir())
    for folder in folders[: -MOST_KEPT + 1]:
        if not KeptRun(folder).lives:
            shutil.rmtree(folder, ignore_errors=True)


def run_lockstep(words: list[str]) -> int:
    """The command, in this process; its exit status."""
    sys.argv[1:] = words
    try:
        runpy.run_module("pipelines", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main(folder: str, *words: str) -> int:
    here = Path(folder)
    atomic.write_json(here / "process.json", {"pid": os.getpid(), "host": atomic.here()})
    console.PROGRESS_FILE = here / "progress"
    status = run_lockstep(list(words))
    atomic.write_json(here / "ended.json", {"status": status})
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
