"""End live jobs, and those that wait for them."""

import os
from collections.abc import Iterable
from pathlib import Path

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.owners import user_name
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.driver.executors import make_executor
from pipelines.driver.orphans import find_orphans, live_attempts
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.slurm.link import unstarted_links
from pipelines.slurm.scheduler import Scheduler
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params


def cancel_stages(repository: Repository, stages: list[str], console: Console) -> None:
    """End the jobs of these stages (of all without any) and of every stage that needs theirs."""
    Scheduler(repository).refresh(now=True)
    live = {**_still_ending(repository), **live_attempts(repository)}
    wanted = _with_dependents(load_params(repository.root), stages) if stages else set(live)
    unknown = [stage for stage in stages if stage not in live]
    if unknown:
        running = ", ".join(live) or "none"
        raise LockstepError(f"no live job of {', '.join(unknown)}; live jobs: {running}")
    chosen = [(stage, attempt) for stage, attempt in live.items() if stage in wanted]
    others = [(stage, attempt) for stage, attempt in chosen if _is_anothers(attempt)]
    chosen = [pair for pair in chosen if pair not in others]
    for _, attempt in chosen:
        attempt.mark_cancelled()
    # From the end of the graph: nothing may start because something before it has ended.
    left = [
        f"{stage}, job {attempt.job}"
        for stage, attempt in reversed(chosen)
        if not _cancel(repository, stage, attempt, console)
    ]
    if left:
        raise LockstepError(
            f"Slurm has not ended {'; '.join(left)} yet: run the same command again, or see squeue"
        )
    if others:
        jobs = "; ".join(
            f"{stage}, job {attempt.job} of {user_name(attempt.launched.user)}"
            for stage, attempt in others
        )
        raise LockstepError(f"only who submitted a job can end it, so these go on: {jobs}")
    if not chosen:
        console.line("nothing to cancel: no job is live")


def cancel_orphans(repository: Repository, console: Console) -> None:
    """End the live jobs that no stage wants."""
    found = find_orphans(repository)
    for orphan in found:
        if orphan.attempt is not None and _is_anothers(orphan.attempt):
            console.line(f"{orphan.what}: job {orphan.job} goes on: another user submitted it")
        elif orphan.attempt is not None:
            orphan.attempt.mark_cancelled()
            _cancel(repository, orphan.what, orphan.attempt, console)
        else:
            Scheduler(repository).cancel([orphan.job])
            console.line(f"{orphan.what}: cancelled job {orphan.job}")
    if not found:
        console.line("no live job is unwanted")


def _is_anothers(attempt: Attempt) -> bool:
    """Whether this user cannot end it; on Slurm, no job but one's own is touched."""
    user = attempt.launched.user
    return user != os.getuid() and (attempt.on_slurm or os.getuid() != 0)


def _still_ending(repository: Repository) -> dict[str, Attempt]:
    """Attempts that were cancelled when Slurm did not listen, so that their jobs may still run."""
    found = {stage: link.attempt for stage, link in unstarted_links(repository).items()}
    for stage, entry in Ledger(repository.jobs).latest().items():
        if current := entry.current:
            found[stage] = current
    return {
        stage: attempt
        for stage, attempt in found.items()
        if attempt.on_slurm and attempt.was_cancelled and not attempt.scheduler.ended
    }


def _cancel(repository: Repository, what: str, attempt: Attempt, console: Console) -> bool:
    gone = make_executor(attempt.launched.executor, repository).cancel(attempt)
    if gone:
        console.line(f"{what}: cancelled job {attempt.job}")
    return gone


def _with_dependents(params: Params, stages: Iterable[str]) -> set[str]:
    """These stages, and all that read what they make, directly or not."""
    nodes = {bound.address: bound for bound in bind_all(params)}
    found = set(stages)
    while True:
        made = [
            Path(path)
            for name in found & nodes.keys()
            for path in (*nodes[name].outs.values(), nodes[name].metrics)
        ]
        more = {
            name
            for name, node in nodes.items()
            if any(path.is_relative_to(needed) for needed in node.inputs.values() for path in made)
        }
        if more <= found:
            return found
        found |= more
