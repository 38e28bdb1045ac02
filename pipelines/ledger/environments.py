"""The machines that a stage was made on: each start of its job leaves word of its environment.

A job that Slurm took off its node goes on elsewhere, with what it had saved, and so may a later
attempt; the shards of a stage have a node each. The record names the environment of whoever wrote
the outputs, and beside it every other one that had a hand in them.
"""

from typing import Any

from pipelines.base import atomic
from pipelines.identity.environment import INFORMATION_ONLY
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.task import Task

_FOLDER = "environments"


def note_environment(attempt: Attempt, task: Task, environment: dict[str, Any]) -> None:
    """To be called when the stage's packages are there, and before it computes anything."""
    name = f"{task.restart:03}.{task.label}.json"
    atomic.write_json(attempt.folder / _FOLDER / name, environment)


def earlier_environments(entry: Entry, last: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that differ from the last, and from each other, in what can change a byte."""
    kinds, environments = [_kind(last)], []
    for attempt in entry.attempts():
        for path in sorted((attempt.folder / _FOLDER).glob("*.json")):
            environment = atomic.load_json(path)
            if _kind(environment) not in kinds:
                kinds.append(_kind(environment))
                environments.append(environment)
    return environments


def _kind(environment: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in environment.items() if key not in INFORMATION_ONLY}
