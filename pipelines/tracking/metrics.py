"""The numbers of an entry under the names that MLflow shows them by.

A stage run has its summary under the very names of the stage's metrics file, at step 0, so that
runs of any algorithm line up as bars; and what it logged at each step under `step/`, as curves.
Were a summary renamed only where a step metric has its name, its place would depend on the
algorithm. The runs above have the evaluation's numbers under their plain names, too, and every
other stage's under the stage's: `score/reward_mean`. In the invocation's run the step is the
iteration, so two pipeline runs are compared as learning curves. There the few numbers that a
comparison begins with are once more under `Headline/`: MLflow sorts by name, capitals first.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.ledger.entry import METRICS_OUT, Entry, Ledger
from stages.contracts.evaluate import EVALUATIONS

STEP_PREFIX = "step/"
LARGEST_BATCH = 1000
HEADLINE_PREFIX = "Headline/"
HEADLINE = ("accuracy", "win_rate", "reward_mean", "kl_to_reference", "entropy", "response_length")
"""Of an evaluation: what to look at first."""


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    time: float
    step: int


@dataclass(frozen=True)
class Place:
    """How far a file was read, and what was there."""

    offset: int
    last_line: bytes


START = Place(0, b"")


def rows_after(place: Place, path: Path) -> tuple[list[dict[str, Any]], Place]:
    """The rows after the place, all of a file that was written anew, and the place behind them."""
    try:
        with path.open("rb") as file:
            # A file that a resumed job wrote anew may have the length, and the inode, of the
            # old one; it does not have the time in its last line.
            file.seek(max(0, place.offset - len(place.last_line)))
            if file.read(len(place.last_line)) != place.last_line:
                place = START
            file.seek(place.offset)
            data = file.read()
    except FileNotFoundError:
        return [], START
    whole = data[: data.rfind(b"\n") + 1]  # a job may be in the middle of its last line
    lines = whole.splitlines(keepends=True)
    last = lines[-1] if lines else place.last_line
    return [json.loads(line) for line in lines], Place(place.offset + len(whole), last)


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
    values = record.metrics if record else None
    if values is None:
        values = atomic.read_json(entry.out / METRICS_OUT)
    if values is None and record is not None and _is_latest(entry):
        values = atomic.read_json(root / entry.spec.metrics)
    return numbers(values or {})


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested mapping, under dotted names."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            flat[safe_name(f"{prefix}{name}")] = float(value)
    return flat


def safe_name(name: str) -> str:
    """A name that MLflow takes: `rollout@iter_001` becomes `rollout.iter_001`."""
    return re.sub(r"[^\w.\-/ ]", "_", name.replace("@", "."))


def names_above(stage: str, metric: str) -> list[str]:
    """What a stage's summary metric is called in the runs above it."""
    if stage not in EVALUATIONS:
        return [f"{stage}/{metric}"]
    return [metric, HEADLINE_PREFIX + metric] if metric in HEADLINE else [metric]


def _is_latest(entry: Entry) -> bool:
    """Whether no later entry of this stage has put its metrics in the workspace."""
    others = Ledger(entry.folder.parent.parent).entries(entry.stage)
    return [other for other in others if other.record is not None][-1:] == [entry]
