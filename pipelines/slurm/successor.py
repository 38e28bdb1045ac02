"""What the jobs of a chain do for one another, since no driver lives that would do it for them.

Before it works, a job queues its successor: one that starts when this one has ended badly, goes on
from its scratch as the next attempt, and leaves the queue where this one ends well. What needs the
stage waits for both to end, and is told so. A job that starts asks how those before it ended:
    the one that it goes on with was stopped by Slurm    it works
    it failed, or somebody has cancelled it              the stage is given up, and all that need it
    a stage that it needs is not done, but goes on       it goes back into the queue, behind that
So whatever is killed, and between whichever two of these steps, a job that is still in the queue
finds out what is left to do.

The batch script calls this before the stage, and after a failure: outside any container, with the
Python that submitted the chain. One job of a chain at a time is in here.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.preflight import BadNode, each_once, exclude_flag
from pipelines.ledger.reports import Result
from pipelines.ledger.state import WAITING, State
from pipelines.ledger.successor import Successor
from pipelines.slurm.link import RECORDER, Link, is_done, links_of, resolved
from pipelines.slurm.outcome import outcome_of
from pipelines.slurm.queue import SlurmSilent, ask
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import LINK_ELSEWHERE, LINK_OVER
from pipelines.slurm.submit import just_wait, submit_batches

SUBMIT_S = 60.0
"""How long a job that has its nodes tries to queue its successor before it works without one."""
SETTLE_S = 120.0
"""How long Slurm may take to say how an earlier job ended."""
LOOK_S = 0.5


def begin(folder: Path) -> int:
    """See to what comes after this job; the exit status says whether it shall work."""
    link = Link(folder)
    chain = _Chain(folder.parent.parent, Scheduler(Repository(link.order.root)))
    chain.settle(link)
    with hold_lock(chain.folder / "lock", wait=True):
        return chain.begin(link)


def end(folder: Path) -> int:
    """After a failure that another try would meet again, nothing need wait for this stage.

    After one of its nodes, its successor must not meet the same node again.
    """
    link = Link(folder)
    chain = _Chain(folder.parent.parent, Scheduler(Repository(link.order.root)))
    with hold_lock(chain.folder / "lock", wait=True):
        if link.attempt.state() is State.FAILED:
            chain.give_up(link, outcome_of(link.attempt).what)
        elif link.attempt.bad_nodes and (named := link.attempt.successor):
            chain.spare_nodes(Link(named.folder), link.attempt)
    return 0


@dataclass(frozen=True)
class _Chain:
    """One chain, for whoever holds its lock."""

    folder: Path
    scheduler: Scheduler

    def settle(self, link: Link) -> None:
        """Until Slurm says for sure how those before this link have ended, as far as they have."""
        deadline = time.monotonic() + SETTLE_S
        needed = [up for up in link.order.upstream if not is_done(self.folder, up)]
        before = [each for up in needed for each in self._of(up)]
        while time.monotonic() < deadline:
            self.scheduler.refresh(now=True)
            ended = [link.predecessor] if link.predecessor else []
            ended += [each for each in before if not _live_jobs(each)]
            if all(_has_ended(each) for each in ended):
                return
            time.sleep(LOOK_S)

    def begin(self, link: Link) -> int:
        attempt, earlier = link.attempt, link.predecessor
        named = attempt.successor
        if named and not named.jobs:
            self.scheduler.refresh(now=True)  # whoever submitted it may have been killed since
        if named and named.jobs and Link(named.folder).order.predecessor is None:
            return LINK_ELSEWHERE  # so another task of the same array has found
        if attempt.was_cancelled or (attempt.result and resolved(link.folder) is None):
            return LINK_OVER
        if earlier:
            its = earlier.attempt.successor
            if its is None or its.folder != link.folder:
                return LINK_OVER  # its place was taken by another, when Slurm did not answer
            if why := self._why_over(earlier):
                self.give_up(link, why)
                return LINK_OVER
            attempt.write(replace(attempt.launched, restarts_before=_restarts(earlier)))
        if is_done(self.folder, link.stage):
            return 0  # another copy was faster: the worker finds all there
        try:
            jobs, lost = self._waits_for(link)
            if lost and link.stage != RECORDER:
                self.give_up(link, "; ".join(f"{stage}: {why}" for stage, why in lost.items()))
                return LINK_OVER
            if jobs:
                self._queue(link, behind=jobs, restarts=attempt.launched.restarts_before)
                print(f"{link.stage}: waiting again, for {', '.join(jobs)}", flush=True)
                return LINK_ELSEWHERE
        except LockstepError as error:
            if link.stage == RECORDER:
                raise  # it records what is there
            self.give_up(link, f"it cannot wait any longer for what it needs: {error}")
            return LINK_OVER
        self._provide(link)
        return 0

    def spare_nodes(self, successor: Link, attempt: Attempt) -> None:
        """Have Slurm start a successor on other nodes than those that were found to be bad.

        If that fails, it may come to one, and finds it bad for itself: it was not told of it.
        """
        launch = successor.attempt.launched
        excluded = each_once((*launch.excluded, *attempt.bad_nodes))
        if excluded == launch.excluded:
            return
        flag = exclude_flag(launch.resources.exclude, excluded)
        try:
            for job in _live_jobs(successor):
                ask(["scontrol", "update", f"JobId={job}", f"ExcNodeList={flag}"])
        except (SlurmSilent, LookupError) as error:
            print(f"{successor.stage}, its successor: {error}", file=sys.stderr, flush=True)
            return
        successor.attempt.write(replace(launch, excluded=excluded))

    def give_up(self, link: Link, why: str) -> None:
        """Take out of the queue what can only fail: its successor, and all that need the stage."""
        print(f"{link.stage}: given up: {why}", file=sys.stderr, flush=True)
        doomed, links = {link.stage}, links_of(self.folder)
        while more := {
            stage
            for stage, its in links.items()
            if stage not in {*doomed, RECORDER} and doomed.intersection(its[0].order.upstream)
        }:
            doomed |= more
        jobs: list[str] = []
        for each in (each for stage in doomed for each in links[stage]):
            attempt = each.attempt
            if resolved(each.folder) or attempt.result:
                continue
            if each.folder == link.folder or not _ran(attempt):
                what = why if each.stage == link.stage else f"{link.stage}, which it needs: {why}"
                attempt.write(Result(state=State.CANCELLED, error=what))
                jobs += _live_jobs(each) if each.folder != link.folder else []
        with suppress(SlurmSilent):  # they find out when they start
            self.scheduler.cancel(jobs)

    def _provide(self, link: Link) -> None:
        """Have a successor in the queue, as far as the profile allows one, and tell of it."""
        attempt, launch = link.attempt, link.attempt.launched
        restarts = launch.restarts_before + int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if restarts >= launch.resources.requeues:
            return
        if (named := attempt.successor) and _live_jobs(Link(named.folder)):
            # Queued before Slurm started this job again, perhaps elsewhere.
            self.spare_nodes(Link(named.folder), attempt)
            return
        own = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
        others = [job for job in attempt.jobs if job != own]
        # Of several arrays any may end badly: behind all of them, it finds out.
        wait = {"behind": [own, *others]} if others else {"succeeds": own}
        new = self._queue(link, restarts=restarts + 1, goes_on=True, **wait)
        job = ",".join(new.attempt.jobs)
        print(f"{link.stage}: job {job} goes on if Slurm ends this one early", flush=True)

    def _queue(
        self,
        link: Link,
        *,
        restarts: int,
        behind: Sequence[str] = (),
        succeeds: str | None = None,
        goes_on: bool = False,
    ) -> Link:
        """Submit the stage once more, and have those that need it wait for that as well."""
        new = link.another()
        new.attempt.write(
            replace(
                link.attempt.launched,
                time=time.time(),
                restarts_before=restarts,
                excluded=_bad_nodes(link),
                token=None,
                job=None,
                jobs=(),
            )
        )
        predecessor = link.folder.name if goes_on else None
        files.write(new.folder / "link.json", replace(link.order, predecessor=predecessor))
        # Before it is submitted: whoever is killed here leaves no job that nobody knows.
        files.write(link.folder / "successor.json", Successor(new.folder))
        try:
            submitted = submit_batches(
                self.scheduler,
                link.stage,
                new.folder,
                new.attempt.launched,
                behind=behind,
                succeeds=succeeds,
                pause=_patience(),
            )
        except LockstepError as error:
            new.attempt.write(Result(state=State.CANCELLED, error=str(error)))
            raise
        new.attempt.write(submitted)
        self._tell(link.stage)
        return new

    def _tell(self, stage: str) -> None:
        """Those that need the stage wait for each job that may still do it."""
        for links in links_of(self.folder).values():
            waiting = Link(links[0].attempt.current.folder)
            upstream = waiting.order.upstream
            jobs = [job for up in upstream for each in self._of(up) for job in _live_jobs(each)]
            states = {job.state for job in waiting.attempt.scheduler.jobs.values()}
            if stage not in upstream or not states.issubset(WAITING):
                continue
            for job in waiting.attempt.jobs:
                change = f"Dependency=afterany:{':'.join(jobs)}"
                try:
                    ask(["scontrol", "update", f"JobId={job}", change])
                except (SlurmSilent, LookupError) as error:
                    # It may start too early; then it finds that out, and waits again.
                    print(f"{waiting.stage}, job {job}: {error}", file=sys.stderr, flush=True)

    def _waits_for(self, link: Link) -> tuple[list[str], dict[str, str]]:
        """What it needs and is not there: the jobs that still do it, and why nobody does."""
        jobs: list[str] = []
        lost: dict[str, str] = {}
        for stage in link.order.upstream:
            # Of one that was killed while it submitted a successor, Slurm may never have heard.
            its = [each for each in self._of(stage) if each.attempt.jobs]
            if is_done(self.folder, stage):
                continue
            if live := [job for each in its for job in _live_jobs(each)]:
                jobs += live
            elif not its:
                lost[stage] = "it was never submitted"
            elif why := self._why_over(its[-1]):
                lost[stage] = why
            else:  # killed before it had a successor
                new = self._queue(its[-1], restarts=_restarts(its[-1]), goes_on=True)
                jobs += new.attempt.jobs
        return jobs, lost

    def _why_over(self, link: Link) -> str | None:
        """Why nobody shall go on with a link that has ended; None where its successor shall."""
        attempt = link.attempt
        if attempt.was_cancelled:
            return "it was cancelled"
        if (result := attempt.result) is not None:
            return None if result.state is State.COMPLETED else result.error or result.state.value
        outcome, most = outcome_of(attempt), attempt.launched.resources.requeues
        if outcome.elsewhere:
            return None
        if not outcome.try_again:
            return outcome.what
        if _restarts(link) > most:
            return f"{outcome.what}, and its profile allows no more restarts (requeues: {most})"
        return None

    def _of(self, stage: str) -> list[Link]:
        return links_of(self.folder).get(stage, [])


def _restarts(link: Link) -> int:
    """How often the stage was started again, once a successor of this link goes on."""
    attempt = link.attempt
    moved = outcome_of(attempt).elsewhere  # a bad node is not the stage's fault
    return attempt.launched.restarts_before + attempt.restarts + (not moved)


def _bad_nodes(link: Link) -> tuple[BadNode, ...]:
    """Those that a link, or one before it, has been told of or has found."""
    earlier = link.predecessor
    return each_once((*(_bad_nodes(earlier) if earlier else ()), *link.attempt.bad_nodes))


def _has_ended(link: Link) -> bool:
    return link.attempt.scheduler.ended or link.attempt.result is not None


def _live_jobs(link: Link) -> list[str]:
    """The numbers of its jobs that Slurm has and that have not ended."""
    attempt = link.attempt
    seen = attempt.scheduler
    if seen.jobs:
        return sorted({job.number for job in seen.jobs.values() if not job.ended})
    return [] if seen.ended else attempt.jobs


def _ran(attempt: Attempt) -> bool:
    """Whether Slurm has started it."""
    return any(
        not (job.state in WAITING or job.never_ran) for job in attempt.scheduler.jobs.values()
    )


def _patience() -> Callable[[str], None]:
    deadline = time.monotonic() + SUBMIT_S

    def pause(answer: str) -> None:
        if time.monotonic() > deadline:
            raise LockstepError(f"Slurm does not take its successor: {answer}")
        just_wait(answer)

    return pause


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelines.slurm.successor")
    parser.add_argument("when", choices=["begin", "end"], help="before or after the stage")
    parser.add_argument("folder", type=Path, help="the folder of the link")
    arguments = parser.parse_args()
    try:
        return begin(arguments.folder) if arguments.when == "begin" else end(arguments.folder)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
