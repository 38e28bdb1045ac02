"""`lockstep prune`: remove the training state of policies that nobody goes on from any more.

The state of a policy (moments, critic, KL coefficient) is an output of its own, and only the next
iteration reads it. Once that one is up to date, it is worth nothing but the room it takes. What is
kept: the state of a policy that no other one starts from, since the next iteration would, unless
all are asked for; and all that a stale stage reads. Nothing of the policies themselves is removed.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.dvc_repo.cache_objects import listed_files, object_path
from pipelines.dvc_repo.graph import open_repo
from pipelines.dvc_repo.plan import make_plan
from pipelines.dvc_repo.pruned import add_pruned
from pipelines.ledger.entry import Ledger
from pipelines.ledger.publish import drop_recorded, recorded_outs
from pipelines.runs.exclusive import only_pipeline
from stages.contracts.catalog import bind_all

_STATE = "state"
"""The name of the output among those of its stage."""


@dataclass(frozen=True)
class PrunedState:
    stage: str
    path: str
    md5: str
    num_bytes: int
    """Of the files that nothing else has."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prune_states(
    repository: Repository, *, unused: bool = False, keep_last: int = 0, dry_run: bool = False
) -> list[PrunedState]:
    """Remove the states, but the last few of them; with `dry_run`, only say which.

    With `unused` also those of policies that no other one starts from.
    """
    root = repository.root
    with only_pipeline(repository, "lockstep prune"):
        with open_repo(root) as repo:
            cache = Path(repo.cache.local.path)
        recorded = recorded_outs(root)
        states = _unneeded(root, unused=unused)
        states = dict(list(states.items())[: max(len(states) - keep_last, 0)])
        kept = {
            md5
            for outs in recorded.values()
            for path, folder in outs.items()
            if path not in states
            for md5 in _objects(cache, folder)
        }
        found = []
        for path, stage in states.items():
            md5 = recorded[stage][path]
            objects = [each for each in _objects(cache, md5) if each not in kept]
            there = [place for each in objects if (place := object_path(cache, each)).exists()]
            if not there and not (root / path).exists():
                continue
            size = sum(place.stat().st_size for place in there)
            found.append(PrunedState(stage, path, md5, size))
            if not dry_run:
                add_pruned(root, {path: md5})
                atomic.remove(root / path)
                # The list of its files last: what is left after a kill is found by it.
                for place in reversed(there):
                    place.unlink(missing_ok=True)
        if not dry_run:
            drop_recorded(root, Ledger(repository.jobs))
    return found


def _unneeded(root: Path, *, unused: bool) -> dict[str, str]:
    """The path of each state that only stages have read that are up to date, with its stage."""
    params = load_params(root)
    current = {stage.address for stage in make_plan(root, params=params) if not stage.stale}
    nodes = bind_all(params)
    states = {}
    for node in nodes:
        if _STATE not in node.outs or _STATE not in node.inputs:
            continue  # where RL starts, there is next to nothing in it
        path = node.outs[_STATE]
        readers = {other.address for other in nodes if path in other.inputs.values()}
        if (readers or unused) and {node.address, *readers} <= current:
            states[path] = node.address
    return states


def _objects(cache: Path, md5: str) -> Iterator[str]:
    """What DVC's cache has for an output: of a folder the list, then each file."""
    yield md5
    if md5.endswith(".dir"):
        yield from (listed_files(object_path(cache, md5), md5) or {}).values()
