"""`python -m pipelines.host.there`: the end of a connection, in the clone on the host.

`follow` shows a run that is kept, and starts it where none lives; `do` is any other command, which
ends with its connection. Both get the signals of the command at the other end as lines on standard
input, whose end is that of the connection.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from pipelines.base.console import Console, ago, say_anything
from pipelines.base.errors import LockstepError
from pipelines.base.git import git
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.host.kept import KeptRun, home_of, latest, run_lockstep, start
from pipelines.host.trees import BASE

POLL_S = 0.1
SIGNALS = ("SIGINT", "SIGTERM")
COMPARED = ("dvc", "submitit", "torch", "transformers")
"""Packages whose versions may differ without an error, and be the reason for what one sees."""
_PROFILE = "LOCKSTEP_PROFILE"


def main(mode: str, *words: str) -> int:
    say_anything()
    if mode == "do":
        _obey(lambda number: os.kill(os.getpid(), number), lambda: _end_as_hung_up())
        return run_lockstep(list(words))
    settings, *command = words
    try:
        return follow(command, **json.loads(settings))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2


def versions() -> dict[str, str]:
    """Of this environment, as far as it has them."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in COMPARED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def follow(words: list[str], versions_here: dict[str, str], columns: int, files: str) -> int:
    """Show the run of these words from its beginning to its end; returns its exit status.

    `columns` are those of the terminal at the other end; 0: there is none. `files` is the commit
    that was brought for it.
    """
    repository = Repository.find()
    with hold_lock(home_of(repository) / "lock", wait=True):
        if (run := _find(repository, words)) is None:
            if (git(repository.root, "rev-parse", BASE) or "").strip() != files:
                raise LockstepError("other files were brought there meanwhile: rerun the command")
            run = _start(repository, words, versions_here)
    _obey(run.send, lambda: os._exit(0))
    if columns:
        os.environ["COLUMNS"] = str(columns)
    console = Console(is_terminal=bool(columns))
    shown = 0
    while True:
        lives = run.lives  # before its output is read, so that nothing of it is missed
        shown += _show_new(run.output, shown, console, whole_lines=lives)
        if not lives:
            break
        if progress := run.progress:
            console.progress(progress)
        else:
            console.clear()
        time.sleep(POLL_S)
    console.clear()
    run.note_followed()
    if run.status is None:
        raise LockstepError("the run was killed; progress is saved: rerun the command")
    return run.status


def _find(repository: Repository, words: list[str]) -> KeptRun | None:
    """The run that lives, if it is that of these words."""
    run = latest(repository)
    if run is None:
        return None
    command = run.command
    when = ago(command["time"])
    if not run.lives:
        if not run.was_followed:
            print(
                f"the last run there (began {when}) has ended with status {run.status} while "
                f"nobody followed it; its output: {run.output}",
                file=sys.stderr,
            )
        return None
    if (command["words"], command["profile"]) != (words, os.environ.get(_PROFILE)):
        profile = f" with {_PROFILE}={command['profile']}" if command["profile"] else ""
        raise LockstepError(
            f"another run is under way there: lockstep {' '.join(command['words'])}{profile}, "
            f"began {when}; the same command follows it, `lockstep cancel` ends its jobs"
        )
    print(f"following the run that began {when}", file=sys.stderr, flush=True)
    return run


def _start(repository: Repository, words: list[str], versions_here: dict[str, str]) -> KeptRun:
    there = versions()
    differ = [
        f"{name} {there[name]} (here {version})"
        for name, version in versions_here.items()
        if there.get(name, version) != version
    ]
    if differ:
        print(f"other versions there: {', '.join(differ)}", file=sys.stderr, flush=True)
    return start(repository, words, os.environ.get(_PROFILE))


def _show_new(path: Path, begin: int, console: Console, *, whole_lines: bool) -> int:
    """Show what a file has from there on; returns how much that was."""
    with path.open("rb") as file:
        file.seek(begin)
        new = file.read()
    if whole_lines:
        new = new[: new.rfind(b"\n") + 1]
    if new:
        console.clear()
        sys.stdout.flush()
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
    return len(new)


def _obey(pass_on: Callable[[signal.Signals], None], leave: Callable[[], None]) -> None:
    """Pass on the signals that are named on standard input; at its end, leave.

    Nothing else here reads standard input.
    """
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def listen() -> None:
        for line in orders:
            if (name := line.strip()) in SIGNALS:
                pass_on(signal.Signals[name])
        leave()

    threading.Thread(target=listen, daemon=True).start()


def _end_as_hung_up() -> None:
    """As a terminal that is closed does; what was started to outlive the command does so."""
    os.kill(os.getpid(), signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
