"""Jobs that run, and jobs that run although no stage wants them any more."""

import shutil
from dataclasses import dataclass

from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.slurm.link import RECORDER, waiting_links
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import COMMENT_PREFIX, NAME_PREFIX
from pipelines.worker.session import living
from stages.contracts.catalog import bind_all


@dataclass(frozen=True)
class Orphan:
    """A live job without a stage that waits for it."""

    job: str
    what: str
    where: str = ""
    attempt: Attempt | None = None
    """Where the ledger knows it."""

    def as_json(self) -> dict[str, str]:
        return {"job": self.job, "what": self.what, "where": self.where}


def live_attempts(repository: Repository) -> dict[str, Attempt]:
    """By stage, in the order of the graph: the newest attempt, where it is queued or runs."""
    live = {stage: link.attempt for stage, link in waiting_links(repository).items()}
    for stage, entry in Ledger(repository.jobs).latest().items():
        if entry.state().alive and (current := entry.current):
            live[stage] = current
    order = [bound.address for bound in bind_all(load_params(repository.root))]
    return {stage: live[stage] for stage in order if stage in live}


def find_orphans(repository: Repository) -> list[Orphan]:
    """Live jobs of this clone that are not what a stage of the graph last asked for."""
    wanted = live_attempts(repository)
    orphans = [
        Orphan(
            job=attempt.job,
            what=f"{entry.stage}, superseded",
            where=worker.host if (worker := attempt.worker) else "",
            attempt=attempt,
        )
        for entry in Ledger(repository.jobs).entries()
        if entry.state().alive
        and not (attempt := entry.attempts()[-1]).on_slurm
        and wanted.get(entry.stage) != attempt
    ]
    scheduler = Scheduler(repository)
    others = [session.folder for session in living(repository)]
    # A self-test is wanted for as long as the command waits that submitted it.
    others += [
        path
        for path in (repository.home / "selftest").glob("[0-9]*")
        if Attempt(path).is_being_submitted()
    ]
    attempts = list(wanted.values())
    attempts += [each.successor for each in attempts if each.successor]
    tokens = scheduler.tokens_of([*others, *(attempt.folder for attempt in attempts)])
    for job in scheduler.live_jobs() if shutil.which("squeue") else ():
        recorder = job.name == f"{NAME_PREFIX}{RECORDER}"
        if job.comment.removeprefix(COMMENT_PREFIX) not in tokens and not recorder:
            orphans.append(Orphan(job.id, f"{job.name}, {job.state}", job.nodes))
    return orphans
