"""Finished policies in MLflow's model registry, each a version with its lineage.

A version's source is a folder among the artifacts of the run that made the policy, so that
`models:/NAME@ALIAS` downloads an ordinary Hugging Face folder with its model card. Where the store
is on this machine's disks that folder is a second name for the policy's files and costs nothing;
elsewhere it is sent.

The same bytes are one version, however often they are registered. What is found out about them
later, such as their evaluation, is added to it.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.export import card
from pipelines.export.folder import compose, describe_anew, is_adapter
from pipelines.export.provenance import Provenance, find_policy
from pipelines.tracking.cursor import store_address
from pipelines.tracking.metrics import HEADLINE

if TYPE_CHECKING:
    from pipelines.tracking.store import Store, Version

SWITCH = "LOCKSTEP_REGISTER"
LARGEST_SENT = 2 * 1024**3
"""Bytes of a policy that are sent to a registry elsewhere without anybody having asked for it."""
FOLDER = "policy"
"""Among the artifacts of a run."""
HASH_TAG = "lockstep.dvc_hash"
POLICY_TAG = "lockstep.policy"
_PARENTS = ("sft", "preference", "policy_update", "online")
_NO_ALIAS = re.compile(r"latest|v\d+", re.IGNORECASE)
_LONGEST_TAG = 4900


@dataclass(frozen=True)
class Registered:
    """A version of a registered model."""

    name: str
    version: str
    policy: str
    hash: str
    run_id: str
    source: str
    aliases: tuple[str, ...]
    is_new: bool
    address: str

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "aliases": list(self.aliases)}

    @property
    def text(self) -> str:
        was = "is" if self.is_new else "was already"
        alias = self.aliases[0] if self.aliases else None
        uri = f"models:/{self.name}@{alias}" if alias else f"models:/{self.name}/{self.version}"
        return (
            f"{self.policy} {self.hash} {was} version {self.version} of {self.name} in "
            f"{self.address}: {uri}"
        )


def register(
    repository: Repository,
    policy: str,
    *,
    revision: str | None = None,
    name: str | None = None,
    alias: str | None = None,
) -> Registered:
    """Register a finished policy, and have the alias point to it; LockstepError says what fails."""
    from pipelines.tracking.rounds import SETTINGS, ship_all
    from pipelines.tracking.shipper import is_switched_off, problem

    if is_switched_off():
        raise LockstepError("LOCKSTEP_TRACKING is off: nothing is sent to MLflow")
    found = find_policy(repository, policy, revision)
    # The run that made it has to be there before something can be linked to it.
    left = ship_all(repository)
    refusal = f"MLflow at {store_address(repository)} did not register {found.policy}"
    if any(found.artifact.hash in entry.outs.values() for entry in left):
        why = problem(repository) or "`lockstep sync` ships it"
        raise LockstepError(f"{refusal}: the run that made it is not there yet; {why}")
    os.environ.update(SETTINGS)
    from pipelines.tracking.store import RefusedError, Store, UnreachableError

    try:
        return put(Store(repository), repository, found, name=name, alias=alias)
    except (RefusedError, UnreachableError) as error:
        raise LockstepError(f"{refusal}: {error}") from error


def put(
    store: "Store",
    repository: Repository,
    found: Provenance,
    *,
    name: str | None = None,
    alias: str | None = None,
    largest: int | None = None,
) -> Registered:
    """The version of the policy's bytes, made if it is not there; sends no more than `largest`."""
    name = name or store.experiment_name
    own = [] if _NO_ALIAS.fullmatch(found.policy) else [found.policy]
    aliases = [*([alias] if alias else []), *own]
    version = store.find_version(name, {HASH_TAG: found.artifact.hash})
    is_new = version is None
    if version is None:
        run = _run_of(store, found)
        source = _place(store, repository, found, run, largest)
        version = store.create_version(
            name,
            source,
            run,
            _tags(found, run),
            description=_description(found),
            about="Policies of this Lockstep project, each version one policy.",
        )
    else:
        _renew(store, repository, found, name, version)
    for each in aliases:
        store.set_alias(name, each, version.number)
    return Registered(
        name,
        version.number,
        found.policy,
        found.artifact.hash,
        version.run_id or "",
        version.source,
        tuple(aliases),
        is_new,
        store.address,
    )


def register_last(store: "Store", repository: Repository) -> list[Registered]:
    """The policies that no other starts from, as a finished pipeline leaves them; never raises.

    LOCKSTEP_REGISTER=off leaves it; `always` also sends large ones to a registry elsewhere.
    """
    wish = os.environ.get(SWITCH, "").lower()
    if wish in ("off", "0", "false", "no"):
        return []
    done = []
    largest = None if wish == "always" else LARGEST_SENT
    # A registry is a view of what is there: neither a run nor another policy fails because of it.
    with _only_said("the policies are"):
        for policy in last_policies(repository):
            with _only_said(f"{policy} is"):
                found = find_policy(repository, policy)
                done.append(put(store, repository, found, largest=largest))
                print(done[-1].text, flush=True)
    return done


@contextmanager
def _only_said(what: str) -> Iterator[None]:
    """What fails does not go further than the log."""
    try:
        yield
    except Exception as error:
        print(f"{what} not registered: {type(error).__name__}: {error}", flush=True)


def last_policies(repository: Repository) -> list[str]:
    """The leaves of the family tree."""
    family = load_params(repository.root).rl.family
    return [name for name in family if name not in family.values()] or ["sft"]


def _run_of(store: "Store", found: Provenance) -> str:
    """The run of the stage that made it, or, where this MLflow has none, one for it."""
    outs = {f"lockstep.out.{p}": d for p, d in found.making.outs.items() if "metrics/" not in p}
    run = store.find_run({"lockstep.address": found.making.stage, **outs})
    if run is not None:
        return run
    run = store.find_or_create_run(
        ("lockstep.registered", found.artifact.hash),
        f"register {found.policy}",
        {"lockstep.kind": "register", "lockstep.address": found.making.stage},
        time.time(),
    )
    store.set_status(run, "FINISHED", time.time())
    return run


def _place(
    store: "Store", repository: Repository, found: Provenance, run: str, largest: int | None
) -> str:
    """Put the policy's folder among the run's artifacts; returns its address."""
    place = store.artifact_uri(run)
    local = _on_disk(place)
    if local is not None:
        target = local / FOLDER
        if target.exists():
            if found.evaluation:
                describe_anew(found, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".registering-") as aside:
                compose(found, Path(aside) / FOLDER, link=True)
                (Path(aside) / FOLDER).rename(target)
        return f"{place.rstrip('/')}/{FOLDER}"
    size = sum(path.stat().st_size for path in found.files.values())
    if largest is not None and size > largest:
        raise LockstepError(
            f"{found.policy} has {size / 1024**3:.1f} GiB, which are not sent to "
            f"{store_address(repository)} unasked: `lockstep register {found.policy}` does it"
        )
    with tempfile.TemporaryDirectory(dir=repository.home, prefix="registering-") as aside:
        compose(found, Path(aside) / FOLDER, link=True)
        store.put_folder(run, FOLDER, Path(aside) / FOLDER)
    return f"{place.rstrip('/')}/{FOLDER}"


def _renew(
    store: "Store", repository: Repository, found: Provenance, name: str, version: "Version"
) -> None:
    """Have a version say what is known now: it may have been registered before its evaluation.

    The files come first: whoever is killed in between finds the tags as they were, and does it
    again.
    """
    if version.tags.get(POLICY_TAG) != found.policy or not found.evaluation:
        # Of two policies with the same bytes the first is described, and a clone that has not
        # evaluated it knows nothing that another may not have said before.
        return
    run = version.run_id or _run_of(store, found)
    tags, description = _tags(found, run), _description(found)
    if store.is_described(version, tags, description):
        return
    local = _on_disk(version.source)
    if local is not None:
        if local.is_dir():
            describe_anew(found, local)
    else:
        with tempfile.TemporaryDirectory(dir=repository.home, prefix="registering-") as aside:
            describe_anew(found, Path(aside))
            store.put_folder(run, FOLDER, Path(aside))
    store.describe_version(name, version, tags, description)


def _on_disk(uri: str) -> Path | None:
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file") or parsed.netloc not in ("", "localhost"):
        return None
    # With such an address MLflow's own clients write to their own disk too.
    return Path(unquote(parsed.path))


def _tags(found: Provenance, run: str) -> Mapping[str, str | None]:
    parents = [m for m in found.stages if m.name in _PARENTS and m is not found.making]
    runs = {m.stage: m.job.run_id for m in found.stages if m.job and m.job.run_id}
    metrics = {name: found.evaluation[name] for name in HEADLINE if name in found.evaluation}
    return {
        HASH_TAG: found.artifact.hash,
        POLICY_TAG: found.policy,
        "lockstep.stage": found.making.stage,
        "lockstep.path": found.artifact.path,
        "lockstep.git_commit": found.commit,
        "lockstep.params_hash": found.params_hash,
        "lockstep.parents": " ".join(m.key or m.name for m in parents) or None,
        "lockstep.run": run,
        "lockstep.runs": _listed(runs),
        "lockstep.given": _listed({item.path: item.hash for item in found.given}),
        **{f"lockstep.metric.{name}": f"{value:.6g}" for name, value in metrics.items()},
    }


def _listed(values: Mapping[str, str]) -> str | None:
    """One tag for many values, which would fill a page of the registry."""
    return " ".join(f"{name}={value}" for name, value in values.items())[:_LONGEST_TAG] or None


def _description(found: Provenance) -> str:
    """The card without its front matter and its longest parts."""
    how = "As `README.md` among its files says."
    text = card.render(found, {}, how, adapter=is_adapter(found))
    body = text.split("---\n", 2)[-1]
    before, _, _ = body.partition("## Params")
    return before.strip()[:_LONGEST_TAG]
