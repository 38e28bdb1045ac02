"""`lockstep logs`: what a stage's job wrote, from its first attempt to its last."""

import time
from collections.abc import Callable

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.slurm.link import unstarted_links, waiting_links
from pipelines.slurm.outcome import is_launchers
from pipelines.slurm.scheduler import Scheduler
from stages.contracts.catalog import STAGES

POLL_S = 0.3


def show_logs(
    repository: Repository, stage: str, write: Callable[[str], object], *, follow: bool = False
) -> None:
    """Write the logs of the stage's newest job; with `follow`, go on until it has ended."""
    entry = Ledger(repository.jobs).latest(stage).get(stage)
    while follow and stage in waiting_links(repository):
        Scheduler(repository).refresh()
        time.sleep(POLL_S)
        entry = Ledger(repository.jobs).latest(stage).get(stage)
    links = unstarted_links(repository)
    if entry is None and stage in links:
        _write_new(links[stage].attempt, {}, write)
        return
    if entry is None:
        known = ", ".join(sorted(Ledger(repository.jobs).latest())) or ", ".join(STAGES)
        raise LockstepError(f"no job of {stage!r} is known here; known: {known}")
    written: dict[str, int] = {}
    while True:
        Scheduler(repository).refresh()
        # A driver that is there may submit again what Slurm has taken away.
        alive = entry.state().alive or (entry.record is None and entry.has_driver())
        for attempt in entry.attempts():
            _write_new(attempt, written, write)
        if not (follow and alive):
            return
        time.sleep(POLL_S)


def _write_new(attempt: Attempt, written: dict[str, int], write: Callable[[str], object]) -> None:
    for path in attempt.logs():
        with path.open(errors="replace", encoding="utf-8") as file:
            file.seek(written.get(str(path), 0))
            if str(path) not in written:
                write(f"==> attempt {attempt.folder.name}, {path.name}\n")
            write("".join(line for line in file.readlines() if not is_launchers(line)))
            written[str(path)] = file.tell()
