"""DVC's list of busy paths, `.dvc/tmp/rwlock`, after a kill.

DVC notes which process reads or writes which path, by its number and its arguments, and takes an
entry for good as long as any process has that number. So the entries of zombies and of processes
whose number another program has by now are dropped here. Numbers say something on their own host
alone: the hosts whose processes may be in the list are remembered, and where that is not this host
alone, or not known, entries are left as they are.
"""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pipelines.base import atomic
from pipelines.base.processes import lives
from pipelines.base.repository import Repository
from pipelines.dvc_repo.locks import SETTLE_S, Wait, hold


def busy_file(repository: Repository) -> Path:
    return repository.root / ".dvc/tmp/rwlock"


def is_list_torn(repository: Repository) -> bool:
    """Whether it is no JSON: DVC is writing it, or was killed when it did."""
    try:
        _read(busy_file(repository))
    except ValueError:
        return True
    return False


def free_paths(repository: Repository, wait: Wait, say: Callable[[str], None]) -> None:
    """Drop the entries of processes that are gone, and a list that is torn."""
    if _needs_repair(repository):
        time.sleep(SETTLE_S)
        with hold(repository, "rwlock.lock", wait, say) as held:
            if held and _needs_repair(repository):
                _repair(repository, say)
    _note_host(repository)


def _needs_repair(repository: Repository) -> bool:
    try:
        listed = _read(busy_file(repository))
        return _without_dead_processes(repository, listed) != listed
    except ValueError:
        return True


def _repair(repository: Repository, say: Callable[[str], None]) -> None:
    busy = busy_file(repository)
    try:
        freed = _without_dead_processes(repository, _read(busy))
    except ValueError:
        say("DVC's list of busy paths is torn: dvc was killed while it wrote it; removing it")
        busy.unlink(missing_ok=True)
    else:
        atomic.write_text(busy, json.dumps(freed))


def _read(busy: Path) -> dict[str, Any]:
    try:
        listed: dict[str, Any] = json.loads(busy.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return listed


def _without_dead_processes(repository: Repository, listed: dict[str, Any]) -> dict[str, Any]:
    """The list without the entries of processes that are known to be gone."""
    if atomic.read_json(_note(repository)) != [socket.gethostname()]:
        return listed
    writes, reads = listed.get("write", {}), listed.get("read", {})
    readers = {path: list(filter(_holds_path, some)) for path, some in reads.items()}
    living = {
        "write": {path: one for path, one in writes.items() if _holds_path(one)},
        "read": {path: some for path, some in readers.items() if some},
    }
    return {key: living.get(key, value) for key, value in listed.items()}


def _holds_path(noted: dict[str, Any]) -> bool:
    """Whether the process lives and was started with the arguments that DVC noted.

    Any program that uses DVC is in the list, not only dvc.
    """
    try:
        process = psutil.Process(int(noted["pid"]))
        words = process.cmdline()
        return lives(process) and (
            # A process of Python's multiprocessing has the arguments of the one that started it.
            "--multiprocessing-fork" in words or " ".join(words).endswith(_arguments(noted["cmd"]))
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _arguments(command: str) -> str:
    """Without the program: `python -m dvc repro` is noted as `/its/path/dvc/__main__.py repro`."""
    _, module, after = command.partition("__main__.py")
    return after if module else command.partition(" ")[2]


def _note_host(repository: Repository) -> None:
    """Remember that processes of this host may be in the list, now or from now on."""
    try:
        listed = _read(busy_file(repository))
    except ValueError:
        return
    readers = [one for some in listed.get("read", {}).values() for one in some]
    known, here = atomic.read_json(_note(repository)) or [], socket.gethostname()
    if all(map(_holds_path, [*listed.get("write", {}).values(), *readers])):
        hosts = [here]  # whoever is in it is one of ours
    else:
        # Of a list that was there before anybody took notes nothing is known.
        hosts = sorted({*known, here}) if known else []
    if hosts != known:
        atomic.write_json(_note(repository), hosts)


def _note(repository: Repository) -> Path:
    return repository.home / "dvc_hosts.json"
