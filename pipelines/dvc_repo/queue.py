"""DVC's queue of experiments: what `dvc exp run --queue` has put there and is not done yet.

DVC keeps the queue in a folder of the clone. Without that folder there is none, and DVC's queue,
which takes half a second to import, is not asked.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.base.errors import LockstepError
from pipelines.base.git import git
from pipelines.config.params import PARAMS_FILE
from pipelines.dvc_repo.graph import open_repo

FOLDER = Path(".dvc/tmp/exps/celery")
DONE = "success"
"""An experiment then, of which `dvc exp show` tells."""


@dataclass(frozen=True)
class QueuedExperiment:
    name: str
    state: str
    """queued, running or failed, as `dvc queue status` has it."""
    task: str
    """DVC's name of the task, for `dvc queue logs` and `dvc queue remove`."""
    created: float
    changes: dict[str, Any]
    """Params that differ from the commit that it starts from."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def queued_experiments(root: Path) -> list[QueuedExperiment]:
    """What waits, what runs and what failed, the oldest first."""
    if not (root / FOLDER).is_dir():
        return []
    logging.getLogger("dvc").setLevel(logging.ERROR)
    from dvc.exceptions import DvcException
    from scmrepo.exceptions import SCMError

    try:
        with open_repo(root) as repo:
            queue = repo.experiments.celery_queue
            rows = [row for row in queue.status() if row["status"].lower() != DONE]
    except (DvcException, SCMError, OSError, ValueError, KeyError) as error:
        raise LockstepError(
            f"DVC's queue of experiments cannot be read ({error}): `dvc queue status` says more"
        ) from None
    found = [
        QueuedExperiment(
            name=row["name"] or row["rev"][:7],
            state=row["status"].lower(),
            task=row["rev"][:7],
            created=row["timestamp"].timestamp(),
            changes=_changes(root, row["rev"]),
        )
        for row in rows
    ]
    return sorted(found, key=lambda each: (each.created, each.name))


def _changes(root: Path, revision: str) -> dict[str, Any]:
    """A queued experiment is a stash, whose first parent is the commit that it starts from."""
    old, new = (_params(root, name) for name in (f"{revision}^1", revision))
    return {key: new.get(key) for key in {**new, **old} if new.get(key) != old.get(key)}


def _params(root: Path, revision: str) -> dict[str, Any]:
    text = git(root, "show", f"{revision}:./{PARAMS_FILE}")
    try:
        values = YAML(typ="safe").load(text or "")
    except YAMLError:
        return {}
    return dict(_leaves(values)) if isinstance(values, dict) else {}


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves += _leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves
