"""The shipper: one background process of a clone that brings MLflow up to date with the ledger.

Importing mlflow takes seconds, so no driver does: it starts this process and goes on.
"""

import os

from pipelines.base.background import Background
from pipelines.base.repository import Repository
from pipelines.tracking import notify, openlineage
from pipelines.tracking.cursor import store_address, unshipped

SWITCH = "LOCKSTEP_TRACKING"
_MODULE = "pipelines.export.shipping"
"""By name: it also registers policies, and so is above this package."""


def is_switched_off() -> bool:
    """Whether the user wants nothing shipped to MLflow."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def start_shipper(repository: Repository) -> None:
    """Make sure that a shipper runs, OpenLineage's emitter and the notifier; returns at once."""
    notify.start_notifier(repository)
    openlineage.start_emitter(repository)
    if not is_switched_off():
        shipper_process(repository).start()


def problem(repository: Repository) -> str | None:
    """What prevents sending to MLflow or OpenLineage, or telling somebody, for the user."""
    of_others = [openlineage.problem(repository), notify.problem(repository)]
    problems = [_mlflow_problem(repository), *of_others]
    return "\n".join(filter(None, problems)) or None


def _mlflow_problem(repository: Repository) -> str | None:
    noted = shipper_process(repository).problem()
    if noted is None:
        return None
    count = len(unshipped(repository))
    if not count:
        return str(noted["text"])
    stages = f"{count} stage{'s' if count > 1 else ''}"
    return f"{noted['text']}; {stages} wait to be shipped: kept here, the next command tries again"


def shipper_process(repository: Repository) -> Background:
    return Background(repository, "shipper", _MODULE, store_address(repository))
