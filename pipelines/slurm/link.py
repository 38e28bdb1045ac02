"""One link of a chain: a job whose stage waits for others, and so for what it will compute.

A chain has a workspace of its own, where each link puts its outputs and finds its inputs; the
clone's workspace is left alone. The folder in which the link was submitted becomes an attempt of
the ledger's entry for what it computes, so that any later command finds it there. A stage whose
link is ended early has more of them: `sft`, `sft~2`, each with a folder of its own.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from pipelines.base.processes import lives
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.identity.code import code_version
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import make_spec
from pipelines.ledger import files, out_hashes
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.invocation import current_invocation, dvc_ancestor
from pipelines.ledger.publish import place_outputs, recorded_outs, remember
from pipelines.ledger.record import Origin
from pipelines.ledger.stop_requests import stop_request_of
from pipelines.ledger.upstream import upstream_graph
from pipelines.slurm.scheduler import Scheduler
from stages.contracts.catalog import bind


@dataclass(frozen=True)
class LinkOrder:
    """link.json, in the folder of a submission: its stage, its clone, and who asked for it."""

    VERSION: ClassVar[int] = 1

    stage: str
    root: Path
    origin: Origin
    upstream: tuple[str, ...] = ()
    """The stages of the chain that must be done before."""
    predecessor: str | None = None
    """The folder's name of the link that this one goes on with."""


RECORDER = "record"
"""The last link of a chain, which belongs to no stage: it has DVC record what the others made."""
_AGAIN = "~"
"""In a folder's name between the stage, which has none in its name, and a number."""


@dataclass(frozen=True)
class _Resolved:
    """resolved.json: the attempt that a link has become, once its job has started."""

    VERSION: ClassVar[int] = 1

    attempt: Path


def is_link(folder: Path) -> bool:
    return (folder / "link.json").exists()


def resolve(folder: Path) -> Attempt:
    """Find out what the link computes; every process of its jobs comes to the same answer."""
    with hold_lock(folder / "resolve.lock", wait=True):
        known = files.read(_Resolved, folder / "resolved.json")
        if known is None:
            known = _Resolved(_resolve(folder).folder)
            files.write(folder / "resolved.json", known)
    return Attempt(known.attempt)


def resolved(folder: Path) -> Entry | None:
    """The entry that a link's job has found to be its own, once it has started."""
    known = files.read(_Resolved, folder / "resolved.json")
    return Attempt(known.attempt).entry if known else None


def pass_on(folder: Path, attempt: Attempt) -> None:
    """Put the outputs where the next links look for them."""
    with hold_lock(folder / "resolve.lock", wait=True):
        chain = folder.parent.parent
        known = place_outputs(attempt.entry, chain / "workspace", folder / "placing")
        remember(chain / "hashes.json", known)
        _mark(chain, Link(folder).stage).touch()


def is_done(chain: Path, stage: str) -> bool:
    """Whether the stage's outputs are where the next links look for them."""
    return _mark(chain, stage).exists()


def _mark(chain: Path, stage: str) -> Path:
    return chain / "links" / stage / "passed_on"


def _resolve(folder: Path) -> Attempt:
    chain, order = folder.parent.parent, files.load(LinkOrder, folder / "link.json")
    if missing := [stage for stage in order.upstream if not is_done(chain, stage)]:
        raise LockstepError(f"{order.stage}: {', '.join(missing)}, which it needs, is not done")
    repository = Repository(order.root)
    params = load_params(chain)
    bound = bind(order.stage, params)
    workspace = chain / "workspace"
    hashes = HashCache(chain / "hashes.json")
    code = code_version(Attempt(folder).launched.code, bound.stage.module, repository.home)
    spec = make_spec(workspace, bound, hashes, code)
    hashes.save()
    entry = Ledger(repository.jobs).find_or_create(spec, order.origin)
    if bound.stage.wants_graph:
        recorded = {**recorded_outs(repository.root), **_made_by(chain)}
        atomic.write_json(folder / "graph.json", upstream_graph(recorded, params, bound))
    return entry.adopt_attempt(folder)


def _made_by(chain: Path) -> dict[str, dict[str, str]]:
    """The hashes of what the links before this one have made."""
    made: dict[str, dict[str, str]] = {}
    for other in sorted((chain / "links").iterdir()):
        entry = resolved(other)
        if entry is not None and entry.out.exists():
            hashes = HashCache()
            hashes.believe(out_hashes.read(entry.out))
            outs: dict[str, Any] = entry.spec.outs
            made[entry.stage] = {path: hashes.of(entry.out / name) for name, path in outs.items()}
    return made


@dataclass(frozen=True)
class Link:
    """A submission of one stage of a chain, in a folder of its own."""

    folder: Path

    @property
    def stage(self) -> str:
        return self.folder.name.partition(_AGAIN)[0]

    @property
    def number(self) -> int:
        """Of this submission, among those of its stage."""
        return int(self.folder.name.partition(_AGAIN)[2] or 1)

    @property
    def order(self) -> LinkOrder:
        return files.load(LinkOrder, self.folder / "link.json")

    @property
    def predecessor(self) -> "Link | None":
        """The one that it goes on with."""
        name = self.order.predecessor
        return Link(self.folder.parent / name) if name else None

    def another(self) -> "Link":
        """A folder for the next submission of its stage."""
        used = [Link(path).number for path in self.folder.parent.glob(f"{self.stage}{_AGAIN}*")]
        new = self.folder.parent / f"{self.stage}{_AGAIN}{max(used, default=1) + 1}"
        new.mkdir()
        return Link(new)

    @property
    def chain(self) -> str:
        return self.folder.parent.parent.name

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.folder)

    def computes(self) -> tuple[dict[str, Any], str]:
        """The params of its stage and the version of the code, as they were submitted."""
        bound = bind(self.stage, _params_of(self.folder.parent.parent))
        version = _version_of(self.attempt.launched.code, bound.stage.module)
        return bound.config.values(bound.key), version


# What was submitted does not change, and the links of a chain have it in common.
_params_of = cache(load_params)
_version_of = cache(code_version)


def links_of(chain: Path) -> dict[str, list[Link]]:
    """By stage: its submissions, oldest first."""
    links: dict[str, list[Link]] = {}
    for link in sorted(map(Link, (chain / "links").iterdir()), key=lambda link: link.number):
        if is_link(link.folder):
            links.setdefault(link.stage, []).append(link)
    return links


def unstarted_links(repository: Repository) -> dict[str, Link]:
    """By stage: the links of the newest chain whose jobs have not got as far as their stage."""
    chains = sorted((repository.home / "chains").glob("*/links"))
    unstarted = {}
    for stage, links in (links_of(chains[-1].parent) if chains else {}).items():
        first = links[0].attempt
        started = any(resolved(link.folder) for link in links)
        if first.launch and not started and stage != RECORDER:
            unstarted[stage] = Link(first.current.folder)
    return unstarted


def waiting_links(repository: Repository) -> dict[str, Link]:
    """Those of them that are still in the queue."""
    return {
        stage: link
        for stage, link in unstarted_links(repository).items()
        if link.attempt.state().alive
    }


def wait_for_link(repository: Repository, address: str, console: Console) -> None:
    """Where a chain has this very stage in the queue: until its job has started, or is gone."""
    scheduler, invocation, dvc = Scheduler(repository), current_invocation(), dvc_ancestor()
    announced = False
    while (link := waiting_links(repository).get(address)) is not None:
        if not _is_what_is_wanted(repository, link):
            return
        scheduler.refresh()
        job = ",".join(link.attempt.jobs)
        if not announced:
            announced = True
            console.line(f"{address}: job {job} of chain {link.chain} is in the queue; waiting")
        gone = dvc is not None and not lives(dvc)
        if gone or not invocation.lives() or stop_request_of(repository, invocation.id):
            raise LockstepError(
                f"{address}: no longer waited for; job {job} of the chain goes on. "
                f"`lockstep cancel {address}` ends it"
            )
        time.sleep(0.5)


def _is_what_is_wanted(repository: Repository, link: Link) -> bool:
    """Whether the link's params and code of the stage are those of the workspace."""
    ours = bind(link.stage, load_params(repository.root))
    code = code_version(repository.root, ours.stage.module, repository.home)
    return link.computes() == (ours.config.values(ours.key), code)
