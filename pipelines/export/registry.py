"""Finished policies in MLflow's model registry, each a version with its lineage.

A version's source is a folder among the artifacts of the run that made the policy, so that
`models:/NAME@ALIAS` downloads an ordinary Hugging Face folder with its model card. Where the store
is on a local disk, that folder holds hard links to the policy's files and costs nothing; otherwise
it is uploaded.

The same bytes are one version, however often they are registered. Later information, such as their
evaluation, is added to it.
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
from pipelines.export.folder import is_adapter, rewrite_model_card, write_folder
from pipelines.export.provenance import Provenance, find_policy
from pipelines.tracking.cursor import store_address
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.metrics import HEADLINE

if TYPE_CHECKING:
    from pipelines.tracking.store import Store, Version

SWITCH = "LOCKSTEP_REGISTER"
LARGEST_SENT = 2 * 1024**3
"""Maximum bytes of a policy that are uploaded to a remote registry without an explicit request."""
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
    """Register a finished policy and point the alias to it; raises LockstepError."""
    from pipelines.tracking.rounds import SETTINGS, ship_all
    from pipelines.tracking.shipper import is_switched_off, problem

    if is_switched_off():
        raise LockstepError("LOCKSTEP_TRACKING is off: nothing is sent to MLflow")
    provenance = find_policy(repository, policy, revision)
    # The run that produced it must exist before a version can be linked to it.
    left = ship_all(repository)
    refusal = f"MLflow at {store_address(repository)} did not register {provenance.policy}"
    if any(provenance.artifact.hash in entry.outs.values() for entry in left):
        why = problem(repository) or "`lockstep sync` ships it"
        raise LockstepError(f"{refusal}: the run that produced it is not there yet; {why}")
    os.environ.update(SETTINGS)
    from pipelines.tracking.store import Store

    try:
        return register_version(Store(repository), repository, provenance, name=name, alias=alias)
    except (RefusedError, UnreachableError) as error:
        raise LockstepError(f"{refusal}: {error}") from error


def register_version(
    store: "Store",
    repository: Repository,
    provenance: Provenance,
    *,
    name: str | None = None,
    alias: str | None = None,
    largest: int | None = None,
) -> Registered:
    """The version of the policy's bytes, created if missing; uploads at most `largest` bytes."""
    name = name or store.experiment_name
    own = [] if _NO_ALIAS.fullmatch(provenance.policy) else [provenance.policy]
    aliases = [*([alias] if alias else []), *own]
    version = store.find_version(name, {HASH_TAG: provenance.artifact.hash})
    is_new = version is None
    if version is None:
        run = _run_of(store, provenance)
        source = _store_files(store, repository, provenance, run, largest)
        version = store.create_version(
            name,
            source,
            run,
            _tags(provenance, run),
            description=_description(provenance),
            about="Policies of this Lockstep project, each version one policy.",
        )
    else:
        _update_version(store, repository, provenance, name, version)
    for each in aliases:
        store.set_alias(name, each, version.number)
    return Registered(
        name,
        version.number,
        provenance.policy,
        provenance.artifact.hash,
        version.run_id or "",
        version.source,
        tuple(aliases),
        is_new,
        store.address,
    )


def register_last(store: "Store", repository: Repository) -> list[Registered]:
    """Register the policies that no other starts from, after a pipeline; never raises.

    LOCKSTEP_REGISTER=off disables it; `always` also uploads large ones to a remote registry.
    """
    switch = os.environ.get(SWITCH, "").lower()
    if switch in ("off", "0", "false", "no"):
        return []
    done = []
    largest = None if switch == "always" else LARGEST_SENT
    # The registry is a view: its errors fail neither a run nor another policy.
    with _errors_logged("the policies are"):
        for policy in last_policies(repository):
            with _errors_logged(f"{policy} is"):
                provenance = find_policy(repository, policy)
                done.append(register_version(store, repository, provenance, largest=largest))
                print(done[-1].text, flush=True)
    return done


@contextmanager
def _errors_logged(what: str) -> Iterator[None]:
    """Print an error instead of raising it."""
    try:
        yield
    except Exception as error:
        print(f"{what} not registered: {type(error).__name__}: {error}", flush=True)


def last_policies(repository: Repository) -> list[str]:
    """The policies that no other policy starts from."""
    family = load_params(repository.root).rl.family
    return [name for name in family if name not in family.values()] or ["sft"]


def _run_of(store: "Store", provenance: Provenance) -> str:
    """The run of the stage that produced it; created where this MLflow has none."""
    outs = {
        f"lockstep.out.{p}": d for p, d in provenance.stage_run.outs.items() if "metrics/" not in p
    }
    run = store.find_run({"lockstep.address": provenance.stage_run.stage, **outs})
    if run is not None:
        return run
    run = store.find_or_create_run(
        ("lockstep.registered", provenance.artifact.hash),
        f"register {provenance.policy}",
        {"lockstep.kind": "register", "lockstep.address": provenance.stage_run.stage},
        time.time(),
    )
    store.set_status(run, "FINISHED", time.time())
    return run


def _store_files(
    store: "Store", repository: Repository, provenance: Provenance, run: str, largest: int | None
) -> str:
    """Put the policy's folder among the run's artifacts; returns its address."""
    uri = store.artifact_uri(run)
    local = _local_path(uri)
    if local is None:
        size = sum(path.stat().st_size for path in provenance.files.values())
        if largest is not None and size > largest:
            raise LockstepError(
                f"{provenance.policy} has {size / 1024**3:.1f} GiB, too much to upload to "
                f"{store_address(repository)} automatically: run `lockstep register "
                f"{provenance.policy}`"
            )
        with _temporary_folder(repository.home) as folder:
            write_folder(provenance, folder / FOLDER, link=True)
            store.put_folder(run, FOLDER, folder / FOLDER)
    elif not (local / FOLDER).exists():
        local.mkdir(parents=True, exist_ok=True)
        with _temporary_folder(local) as folder:
            write_folder(provenance, folder / FOLDER, link=True)
            (folder / FOLDER).rename(local / FOLDER)
    elif provenance.evaluation:
        rewrite_model_card(provenance, local / FOLDER)
    return f"{uri.rstrip('/')}/{FOLDER}"


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent, prefix=".registering-") as folder:
        yield Path(folder)


def _update_version(
    store: "Store", repository: Repository, provenance: Provenance, name: str, version: "Version"
) -> None:
    """Update the description of a version: it may have been registered before its evaluation.

    The files come first: after a kill in between, the tags are still old, and it is done again.
    """
    if version.tags.get(POLICY_TAG) != provenance.policy or not provenance.evaluation:
        # Of two policies with the same bytes the first is described, and a clone that has not
        # evaluated it has nothing to add.
        return
    run = version.run_id or _run_of(store, provenance)
    tags, description = _tags(provenance, run), _description(provenance)
    if store.is_described(version, tags, description):
        return
    local = _local_path(version.source)
    if local is not None:
        if local.is_dir():
            rewrite_model_card(provenance, local)
    else:
        with _temporary_folder(repository.home) as folder:
            rewrite_model_card(provenance, folder)
            store.put_folder(run, FOLDER, folder)
    store.describe_version(name, version, tags, description)


def _local_path(uri: str) -> Path | None:
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file") or parsed.netloc not in ("", "localhost"):
        return None
    # With such an address MLflow's own clients write to their local disk too.
    return Path(unquote(parsed.path))


def _tags(provenance: Provenance, run: str) -> Mapping[str, str | None]:
    parents = [m for m in provenance.stages if m.name in _PARENTS and m is not provenance.stage_run]
    runs = {m.stage: m.job.mlflow_run for m in provenance.stages if m.job and m.job.mlflow_run}
    metrics = {
        name: provenance.evaluation[name] for name in HEADLINE if name in provenance.evaluation
    }
    return {
        HASH_TAG: provenance.artifact.hash,
        POLICY_TAG: provenance.policy,
        "lockstep.stage": provenance.stage_run.stage,
        "lockstep.path": provenance.artifact.path,
        "lockstep.git_commit": provenance.commit,
        "lockstep.params_hash": provenance.params_hash,
        "lockstep.parents": " ".join(m.key or m.name for m in parents) or None,
        "lockstep.run": run,
        "lockstep.runs": _listed(runs),
        "lockstep.given": _listed({item.path: item.hash for item in provenance.given}),
        **{f"lockstep.metric.{name}": f"{value:.6g}" for name, value in metrics.items()},
    }


def _listed(values: Mapping[str, str]) -> str | None:
    """One tag for many values, which would fill a page of the registry."""
    return " ".join(f"{name}={value}" for name, value in values.items())[:_LONGEST_TAG] or None


def _description(provenance: Provenance) -> str:
    """The card without its front matter and its longest parts."""
    how = "As `README.md` among its files says."
    text = card.render(provenance, {}, how, adapter=is_adapter(provenance))
    body = text.split("---\n", 2)[-1]
    before, _, _ = body.partition("## Params")
    return before.strip()[:_LONGEST_TAG]
