"""The emitter: a background process of a clone that sends OpenLineage events, one run per stage.

Only this process sends events; jobs send none. `openlineage.json` beside each entry says which
event was sent last. It is written after the endpoint has taken the event and before the next is
sent, so every event arrives at least once and, unless a kill comes just between the two, once. A
run's id follows from its entry, so an event that arrives twice is the same both times.

Where OpenLineage is not configured, nothing of this is imported or started.
"""

import hashlib
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

from pipelines.base.background import Background, run_in_background
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.openlineage_events import LastEvent, Scan


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
    """Make sure that events are sent, if that is configured; returns at once, never fails."""
    if not is_configured(repository):
        return
    if importlib.util.find_spec("openlineage") is None:
        remedy = "pip install -c constraints.txt -e '.[openlineage]'"
        text = f"OpenLineage is configured, but openlineage-python is not installed: {remedy}"
        emitter_process(repository).note_problem(text)
        return
    emitter_process(repository).start()


class Emitter:
    """Sends the events that entries owe."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._process = emitter_process(repository)
        self._scan = Scan(repository)
        self._owing: list[tuple[Entry, list[str]]] = []

    @property
    def jobs_alive(self) -> bool:
        return self._scan.alive

    def is_busy(self) -> bool:
        Scheduler(self._repository).refresh()
        self._owing = list(self._scan.owing())
        return bool(self._owing or self._scan.alive)

    def connect(self) -> bool:
        try:
            from pipelines.tracking.openlineage_client import Client

            self._client = Client(self._repository)
        except Exception as error:
            # Whatever openlineage-python thinks of its configuration: printed, nothing else stops.
            self._process.note_problem(f"no OpenLineage event can be sent: {error}")
            return False
        return True

    def send(self) -> bool:
        for entry, events in self._owing:
            for event in events:
                refusal = None
                try:
                    self._client.emit(entry, event)
                except UnreachableError as error:
                    text = f"OpenLineage does not take events ({error})"
                    self._process.note_problem(text)
                    return False
                except RefusedError as error:
                    refusal = redact(str(error))
                    print(f"{entry.stage}: {event} was refused: {refusal}", flush=True)
                except FileNotFoundError:
                    break  # the entry was removed while we looked at it
                LastEvent(event, len(entry.attempts()), refusal).save(entry)
        self._process.note_problem(None)
        return True

    def close(self) -> None:
        self._client.close()


def problem(repository: Repository) -> str | None:
    """What prevents sending, for the user."""
    noted = emitter_process(repository).problem()
    if noted is None or not is_configured(repository):
        return None
    return f"{noted['text']}; events are kept here, the next command tries again"


def emitter_process(repository: Repository) -> Background:
    """One for each configuration: a command with another one takes over."""
    settings = {n: v for n, v in os.environ.items() if n.startswith("OPENLINEAGE_")}
    files = [path.read_bytes() for path in _config_files(repository) if path.is_file()]
    address = hashlib.sha256(repr((sorted(settings.items()), files)).encode()).hexdigest()
    return Background(repository, "openlineage", "pipelines.tracking.openlineage", address)


def run_emitter(repository: Repository, lock_timeout: float) -> None:
    emitter_process(repository).serve(partial(Emitter, repository), lock_timeout)


if __name__ == "__main__":
    run_in_background(run_emitter, sys.argv[1:])
