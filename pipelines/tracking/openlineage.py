"""Telling OpenLineage: a run a stage, as a view of the ledger, by a background process of its own.

Like MLflow it is told by nobody but that process; jobs emit nothing. A cursor beside each entry,
`openlineage.json`, says which event was sent last. It is written after the endpoint has taken the
event and before the next is sent, so every event arrives at least once and, unless a kill comes
just between the two, once. A run's id follows from its entry, so an event that comes twice says the
same thing twice.

Where OpenLineage is not configured, nothing of this is imported or started.
"""

import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base import atomic
from pipelines.base.background import PATIENCE_S, Background, Patience, run_in_background
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.openlineage_events import Cursor, Scan

if TYPE_CHECKING:
    from pipelines.tracking.openlineage_client import Client

INTERVAL_S = 1.0
LINGER_S = 5.0
"""How long to stay after the last work: bridges the gap between two stages."""
GIVE_UP_S = 25.0
LONGEST_PAUSE_S = 15.0
_POLL_S = 0.3


def is_configured(repository: Repository) -> bool:
    """Whether openlineage-python would find somewhere to send events from this clone."""
    if os.environ.get("OPENLINEAGE_DISABLED", "").lower().strip() == "true":
        return False
    named = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG")
    return (
        any(os.environ.get(name) for name in named)
        or any(name.startswith("OPENLINEAGE__TRANSPORT") for name in os.environ)
        or any(path.is_file() for path in _config_files(repository))
    )


def _config_files(repository: Repository) -> list[Path]:
    named = os.environ.get("OPENLINEAGE_CONFIG")
    home = Path.home() / ".openlineage"
    return [
        *([Path(named)] if named else []),
        *(f / "openlineage.yml" for f in (repository.root, home)),
    ]


def start_emitter(repository: Repository) -> None:
    """See to it that events are sent, if anybody wants them; returns at once, never fails."""
    if not is_configured(repository):
        return
    if importlib.util.find_spec("openlineage") is None:
        remedy = "pip install -c constraints.txt -e '.[openlineage]'"
        text = f"OpenLineage is configured, but openlineage-python is not installed: {remedy}"
        note_problem(repository, text)
        return
    _process(repository).start()


def wait_until_told(repository: Repository, timeout: float | None, before: Any) -> bool:
    """Wait until nothing is owed; False when it takes too long, or something is in the way.

    Without a timeout nothing takes too long while an emitter is at work. `before` is the problem
    that was noted before anybody tried, and need not be one any more.
    """
    scan, patience = Scan(repository), Patience(_process(repository).works, timeout)
    while is_configured(repository) and any(scan.owing()):
        noted = noted_problem(repository)
        if not patience.lasts() or (noted and noted != before):
            return False
        time.sleep(_POLL_S)
    return True


def run_emitter(repository: Repository, patience: float) -> None:
    """Send events until there are none left to send, unless somebody else does already."""
    process = _process(repository)
    while True:
        with process.alone(patience) as held:
            if not held or not _emit(repository, process):
                return
        # Whoever found the lock taken a moment ago relies on being seen.
        scan = Scan(repository)
        if not repository.home.is_dir() or not (any(scan.owing()) or scan.alive):
            return
        patience = PATIENCE_S


def _emit(repository: Repository, process: Background) -> bool:
    """Whether it ended because all was told."""
    scan, client = Scan(repository), None
    pause = INTERVAL_S
    worked = progressed = time.monotonic()
    while process.is_wanted():
        Scheduler(repository).refresh()
        owing = list(scan.owing())
        if owing:
            client = client or _make_client(repository)
            if client is None:
                return False
            if _send(repository, client, owing):
                progressed, pause = time.monotonic(), INTERVAL_S
            else:
                pause = min(pause * 2, LONGEST_PAUSE_S)
                if not scan.alive and time.monotonic() - progressed > GIVE_UP_S:
                    return False
        if owing or scan.alive:
            worked = time.monotonic()
        elif time.monotonic() - worked > LINGER_S:
            break
        process.pause(pause)
    if client is not None:
        client.close()
    return process.is_wanted()


def _make_client(repository: Repository) -> "Client | None":
    try:
        from pipelines.tracking.openlineage_client import Client

        return Client(repository)
    except Exception as error:
        # Whatever openlineage-python thinks of its configuration: said, and nothing else stops.
        note_problem(repository, f"OpenLineage cannot be told: {error}")
        return None


def _send(
    repository: Repository, client: "Client", owing: list[tuple[Entry, Cursor, list[str]]]
) -> bool:
    from pipelines.tracking.openlineage_client import RefusedError, UnreachableError

    for entry, _, events in owing:
        for event in events:
            refusal = None
            try:
                client.emit(entry, event)
            except UnreachableError as error:
                note_problem(repository, f"OpenLineage does not take events ({error})")
                return False
            except RefusedError as error:
                refusal = redact(str(error))
                print(f"{entry.stage}: {event} was refused: {refusal}", flush=True)
            except FileNotFoundError:
                break  # the entry was removed while we looked at it
            Cursor(event, len(entry.attempts()), refusal).save(entry)
    note_problem(repository, None)
    return True


def note_problem(repository: Repository, text: str | None) -> None:
    """Keep what is in the way for the commands that talk to people, or forget it."""
    path = _problem_path(repository)
    if text is None:
        path.unlink(missing_ok=True)
        return
    repository.home.mkdir(exist_ok=True)
    atomic.write_json(path, {"text": redact(text), "time": time.time()})


def noted_problem(repository: Repository) -> dict[str, Any] | None:
    noted: dict[str, Any] | None = atomic.read_json(_problem_path(repository))
    return noted


def problem(repository: Repository) -> str | None:
    """What is in the way of telling OpenLineage, in words for people."""
    noted = noted_problem(repository)
    if noted is None or not is_configured(repository):
        return None
    return f"{noted['text']}; events are kept here, the next command tries again"


def _problem_path(repository: Repository) -> Path:
    return repository.home / "openlineage_problem.json"


def _process(repository: Repository) -> Background:
    """One for each configuration: a command with another one takes over."""
    settings = {n: v for n, v in os.environ.items() if n.startswith("OPENLINEAGE_")}
    files = [path.read_bytes() for path in _config_files(repository) if path.is_file()]
    address = hashlib.sha256(repr((sorted(settings.items()), files)).encode()).hexdigest()
    return Background(repository, "openlineage", "pipelines.tracking.openlineage", address)


if __name__ == "__main__":
    run_in_background(run_emitter, sys.argv[1:])
