"""The numbers of an entry under the names that MLflow shows them by.

A stage run has its summary under the very names of the stage's metrics file, at step 0, so that
runs of any algorithm line up as bars; and what it logged at each step under `step/`, as curves.
Were a summary renamed only where a step metric has its name, its place would depend on the
algorithm. The runs above have the evaluation's numbers under their plain names, too, and every
other stage's under the stage's: `score/reward_mean`. In the invocation's run the step is the
iteration, so two pipeline runs are compared as learning curves.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import atomic
from pipelines.ledger import METRICS_OUT, Entry

STEP_PREFIX = "step/"
LARGEST_BATCH = 1000
_EVALUATIONS = ("evaluate", "evaluate_sft")


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    time: float
    step: int


class MetricsTail:
    """Reads the new lines of growing metrics files, and all of one that was written anew."""

    def __init__(self) -> None:
        self._places: dict[Path, tuple[int, int]] = {}

    def rows(self, path: Path) -> tuple[list[dict[str, Any]], tuple[int, int]]:
        """The rows since `keep` was last called with a place, and the place behind them."""
        try:
            with path.open("rb") as file:
                inode = path.stat().st_ino
                known, offset = self._places.get(path, (inode, 0))
                if known != inode or file.seek(0, 2) < offset:
                    offset = 0
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return [], (0, 0)
        whole = data[: data.rfind(b"\n") + 1]  # a job may be in the middle of its last line
        return [json.loads(line) for line in whole.splitlines()], (inode, offset + len(whole))

    def keep(self, path: Path, place: tuple[int, int]) -> None:
        self._places[path] = place

    def forget(self, path: Path) -> None:
        """Read it from its beginning the next time."""
        self._places.pop(path, None)


def batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Whole rows, as many at a time as MLflow takes in one request."""
    batch: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        if batch and size + len(row["metrics"]) > LARGEST_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += len(row["metrics"])
    if batch:
        yield batch


def summary_of(root: Path, entry: Entry) -> dict[str, float]:
    """The stage's summary metrics as it returned them, flat."""
    record = entry.record
    values = (record or {}).get("metrics")
    if values is None:
        values = atomic.read_json(entry.out / METRICS_OUT)
    if values is None and record is not None and _is_latest(entry):
        values = atomic.read_json(root / entry.spec.metrics)
    return numbers(values or {})


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested mapping, under dotted names."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            found[safe_name(f"{prefix}{name}")] = float(value)
    return found


def safe_name(name: str) -> str:
    """A name that MLflow takes: `rollout@iter_001` becomes `rollout.iter_001`."""
    return re.sub(r"[^\w.\-/ ]", "_", name.replace("@", "."))


def name_above(stage: str, metric: str) -> str:
    """What a stage's summary metric is called in the runs above it."""
    return metric if stage in _EVALUATIONS else f"{stage}/{metric}"


def _is_latest(entry: Entry) -> bool:
    """Whether no later entry of this stage has put its metrics in the workspace."""
    published = (entry.record or {})["published"]
    others = (Entry(path.parent) for path in entry.folder.parent.glob("*/record.json"))
    return all((other.record or {})["published"] <= published for other in others)
