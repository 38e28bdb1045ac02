"""One look at Slurm for all jobs of a clone, shared by all commands that wait for one.

Whoever wants to know calls `refresh`. If nobody has asked Slurm lately, the caller does, for every
live submission at once, and leaves what it heard as `scheduler.json` in each attempt. Looks become
rarer while nothing changes, and rarer still while slurmctld does not answer.

A submission is known to Slurm by the token in its comment, which is noted here before sbatch is
called: a job whose number nobody could write down any more is found by it, and a job that a
crashed slurmctld gave a used number to is not taken for ours.
"""

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pipelines.base.locks import hold_lock
from pipelines.base.processes import ProcessMark, this_process
from pipelines.base.repository import Repository
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import VANISHED
from pipelines.slurm import queue as slurm_queue
from pipelines.slurm.queue import SlurmSilent
from pipelines.slurm.script import COMMENT_PREFIX, NAME_PREFIX

SHORTEST_S, LONGEST_S, LONGEST_SILENCE_S = 1.0, 10.0, 30.0
GROWTH = 1.3
VANISH_S = 20.0
"""How long slurmctld must not know a job before it counts as gone."""
MOST_DETAILS = 8
NEVER_ARRIVED = "?"
CONFIRM_S = 1.0
"""A job that Slurm puts back into the queue may show an end for a moment."""


@dataclass(frozen=True)
class _Submission:
    """live/TOKEN.json: a submission whose jobs are not known to have ended."""

    VERSION: ClassVar[int] = 1

    folder: Path
    submitter: ProcessMark | None = None
    """Who calls sbatch for it, until that is done."""


@dataclass(frozen=True)
class _Query:
    """last_query.json: when Slurm was last asked, and when it is to be asked again."""

    VERSION: ClassVar[int] = 1

    time: float = 0.0
    interval: float = SHORTEST_S
    silence: str | None = None
    """Why Slurm gave no answer, if it gave none."""


@dataclass(frozen=True)
class Scheduler:
    """Slurm, as one clone sees it."""

    repository: Repository

    @property
    def _folder(self) -> Path:
        return self.repository.home / "slurm"

    @property
    def _clone(self) -> str:
        """Tells the jobs of this clone from those of another."""
        return hashlib.sha256(str(self.repository.root).encode()).hexdigest()[:8]

    def register(self, folder: Path) -> str:
        """Note a submission that is about to be made; the token that its jobs must bear."""
        for token, submission in self._live().items():
            if submission.folder == folder:
                self._place(token).unlink(missing_ok=True)
        token = self.new_token()
        files.write(self._place(token), _Submission(folder, this_process()))
        return token

    def submitted(self, token: str, folder: Path) -> None:
        """Note that sbatch has ended: from now on, a job that Slurm does not know is gone."""
        (folder / "scheduler.json").unlink(missing_ok=True)
        files.write(self._place(token), _Submission(folder))
        self.refresh_soon()

    def tokens_of(self, folders: Iterable[Path]) -> set[str]:
        """The tokens of these submissions, as far as their jobs are not known to have ended."""
        wanted = {folder.resolve() for folder in folders}
        live = self._live().items()
        return {token for token, submission in live if submission.folder.resolve() in wanted}

    def _live(self) -> dict[str, _Submission]:
        """By token: the submissions whose jobs are not known to have ended."""
        places = sorted((self._folder / "live").glob("*.json"))
        submissions = {place.stem: files.read(_Submission, place) for place in places}
        return {token: each for token, each in submissions.items() if each}

    def _place(self, token: str) -> Path:
        return self._folder / "live" / f"{token}.json"

    def new_token(self) -> str:
        """What a job's comment shall say; `register` notes it where somebody waits for the job."""
        return f"{self._clone}-{uuid.uuid4().hex[:12]}"

    def refresh_soon(self) -> None:
        """Look again at once: something is about to change."""
        (self._folder / "last_query.json").unlink(missing_ok=True)

    def silence(self) -> str | None:
        """Why Slurm gives no answer, if it gives none."""
        return self._last_query().silence

    def refresh(self, *, now: bool = False) -> None:
        """See to it that what the attempts say about Slurm is of late, or of this moment."""
        if not any((self._folder / "live").glob("*.json")) or not (now or self._due()):
            return
        with hold_lock(self._folder / "lock", wait=now) as held:
            if held and (now or self._due()):
                self._ask_slurm()

    def live_jobs(self) -> list[SlurmJob]:
        """Every job of this clone that Slurm has and that has not ended."""
        prefix = f"{COMMENT_PREFIX}{self._clone}-"
        return [
            job for job in slurm_queue.my_jobs() if job.comment.startswith(prefix) and not job.ended
        ]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Ask Slurm to end these jobs, but none that this clone has not submitted."""
        slurm_queue.cancel_jobs(jobs, self._is_ours)

    def _is_ours(self, job: SlurmJob) -> bool:
        """By the comment, or where the site writes comments of its own, by the name."""
        if job.comment.startswith(COMMENT_PREFIX):
            return job.comment.startswith(f"{COMMENT_PREFIX}{self._clone}-")
        return job.name.startswith(NAME_PREFIX)

    def _due(self) -> bool:
        last = self._last_query()
        return not 0 <= time.time() - last.time < last.interval

    def _last_query(self) -> _Query:
        return files.read(_Query, self._folder / "last_query.json") or _Query()

    def _ask_slurm(self) -> None:
        interval, silence, changed = self._last_query().interval, None, False
        try:
            jobs = slurm_queue.my_jobs()
            for token, submission in self._live().items():
                changed |= self._note(token, submission, jobs)
            interval = SHORTEST_S if changed else min(interval * GROWTH, LONGEST_S)
        except SlurmSilent as reason:
            silence = str(reason)
            interval = min(interval * 2, LONGEST_SILENCE_S)
        files.write(self._folder / "last_query.json", _Query(time.time(), interval, silence))

    def _note(self, token: str, submission: _Submission, jobs: list[SlurmJob]) -> bool:
        """Write down what Slurm says about one submission; whether that is news."""
        if not submission.folder.is_dir():
            self._place(token).unlink(missing_ok=True)  # its ledger was removed
            return False
        attempt, submitter = Attempt(submission.folder), submission.submitter
        before = attempt.scheduler
        seen = self._jobs_of(token, attempt, jobs)
        # sbatch may take minutes while slurmctld is away.
        if not seen and (attempt.prepared or (submitter and submitter.lives_here())):
            return False
        known = before.jobs
        unseen = set(known or (() if seen else attempt.jobs)) - set(seen)
        seen |= {key: known[key] for key in unseen if key in known}
        asked = {key for key in unseen if key not in known or not known[key].ended}
        answers = _remembered(asked, token)
        seen |= answers
        # Not even a number is known of a submission that slurmctld lost, or never took.
        missing = asked - set(answers) if seen or asked else {NEVER_ARRIVED}
        since = _earlier(before.missing_since) if missing else None
        if since is not None and time.time() - since >= VANISH_S:
            seen |= {key: SlurmJob(key, VANISHED) for key in missing}
        if seen and all(job.ended for job in seen.values()):
            seen |= {key: _with_exit(job) for key, job in list(seen.items())[:MOST_DETAILS]}
        over = bool(seen) and all(job.ended for job in seen.values())
        never_ran = over and all(job.never_ran for job in seen.values())
        ended_since = _earlier(before.ended_since) if over else None
        confirmed = ended_since is not None and time.time() - ended_since >= CONFIRM_S
        news = SchedulerView(
            token=token,
            jobs=dict(sorted(seen.items())),
            missing_since=since,
            ended_since=ended_since,
            ended=confirmed or never_ran,
        )
        if news != before:
            attempt.write(news)
        if news.ended:
            self._place(token).unlink(missing_ok=True)
        return over or _gist(news) != _gist(before)

    def _jobs_of(self, token: str, attempt: Attempt, jobs: list[SlurmJob]) -> dict[str, SlurmJob]:
        """The jobs of a submission: by its token, else by numbers under which no other is known."""
        ours = {job.id: job for job in jobs if job.comment == f"{COMMENT_PREFIX}{token}"}
        if ours:
            return ours
        numbers = set(attempt.jobs)
        return {
            job.id: job
            for job in jobs
            if job.number in numbers
            and not job.comment.startswith(COMMENT_PREFIX)
            # Some sites write comments of their own; then the name has to do.
            and job.name.startswith(NAME_PREFIX)
        }


def _remembered(jobs: set[str], token: str) -> dict[str, SlurmJob]:
    """What scontrol, and then accounting, say about jobs that squeue left out."""
    remembered: dict[str, SlurmJob] = {}
    for job in sorted(jobs)[:MOST_DETAILS]:
        known = slurm_queue.details(job)
        if known and known.comment in ("", "(null)", f"{COMMENT_PREFIX}{token}"):
            remembered[job] = known
    old = slurm_queue.accounted(jobs - set(remembered))
    return remembered | {job: old[job] for job in jobs - set(remembered) if job in old}


def _with_exit(job: SlurmJob) -> SlurmJob:
    """With the exit status, which squeue does not tell, of a job that ended badly."""
    if job.state in ("COMPLETED", VANISHED) or job.exit:
        return job
    known = slurm_queue.details(job.id) or job
    if known.state != "CANCELLED":
        return known
    accounted = slurm_queue.accounted([job.id]).get(job.id)
    return replace(known, by=accounted.by) if accounted else known


def _earlier(noted: float | None) -> float:
    """A time noted before, or now; one that lies ahead was noted before the clock was set back."""
    return min(noted or time.time(), time.time())


def _gist(view: SchedulerView) -> list[tuple[str, str, str]]:
    return [(job.id, job.state, job.reason) for job in view.jobs.values()]
