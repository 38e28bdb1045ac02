"""One stage of the Run page: its resources, the end of its logs, and the curves that it logs.

A file that grows is read on from where it was last read. Of long curves as many points are shown as
a chart has room for, the last one always among them.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.profiles import Resources, load_profile
from pipelines.ledger.entry import Attempt
from pipelines.runs.cost_table import in_words
from pipelines.slurm.outcome import is_launchers
from pipelines.slurm.spent import cost_of_entry
from pipelines.tracking.metrics import START, Place, rows_after, summary_of
from pipelines.ui.run_rows import Row, entry_of, finite

POINTS = 240
LARGEST_TAIL = 64 * 1024
LOG_LINES = 200
LOGS = 4
"""Of a job of many processes, the logs that were written to last."""
KEPT = 16
"""Files whose curves are remembered."""
FIRST = (
    *("reward_mean", "reward", "accuracy", "preference_accuracy", "kl_to_reference", "approx_kl"),
    *("entropy", "response_length", "loss", "policy_loss", "value_loss", "truncation_rate"),
)
"""The curves to look at first; the others follow as they are logged."""

Points = list[tuple[float, float]]


class Curves:
    """What is logged in metrics.jsonl, by metric, for every page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, tuple[Place, dict[str, Points]]] = OrderedDict()

    def of(self, path: Path) -> list[dict[str, Any]]:
        with self._lock:
            place, curves = self._kept.pop(path, (START, {}))
            if not _goes_on(place, path):
                place, curves = START, {}
            rows, after = rows_after(place, path)
            for row in rows:
                for name, value in row["metrics"].items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        curves.setdefault(name, []).append((row["step"], value))
            self._kept[path] = after, curves
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return [{"name": name, "points": thinned(curves[name])} for name in in_order(curves)]


def _goes_on(place: Place, path: Path) -> bool:
    """Whether the file still has what was read of it: a resumed job writes it anew."""
    try:
        with path.open("rb") as file:
            file.seek(place.offset - len(place.last_line))
            return file.read(len(place.last_line)) == place.last_line
    except FileNotFoundError:
        return False


def in_order(names: Iterable[str]) -> list[str]:
    """What is looked at first, then the others as they come."""
    given = list(names)
    return list(dict.fromkeys([*(name for name in FIRST if name in given), *given]))


def thinned(points: Points) -> Points:
    step = max(1, math.ceil(len(points) / POINTS))
    # Counted from the end: the newest point is always there.
    return points[::-1][::step][::-1]


def detail(repository: Repository, row: Row, curves: Curves) -> dict[str, Any]:
    """What the page shows of the stage that was chosen."""
    entry = entry_of(row)
    attempt = Attempt(Path(row["log"])) if row["log"] else None
    summary = finite(summary_of(repository.root, entry)) if entry else {}
    cost = cost_of_entry(entry) if entry else None
    return {
        "stage": row["stage"],
        "resources": _resources(repository, row, attempt),
        "cost": in_words(cost) if cost and cost.took_anything else None,
        "curves": curves.of(entry.folder / "metrics.jsonl") if entry else [],
        "summary": {name: summary[name] for name in in_order(summary)},
        "logs": log_tails(attempt) if attempt else [],
    }


def log_tails(attempt: Attempt) -> list[dict[str, Any]]:
    """The end of the logs that were written to last, without what a launcher says of itself."""
    paths = sorted(attempt.logs(), key=lambda path: path.stat().st_mtime)
    tails = []
    for path in sorted(paths[-LOGS:]):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LARGEST_TAIL))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
        shown = [line for line in lines if not is_launchers(line)][-LOG_LINES:]
        if text := "\n".join(shown).strip("\n"):
            tails.append({"name": path.name, "path": str(path), "text": text})
    return tails


def _resources(repository: Repository, row: Row, attempt: Attempt | None) -> Mapping[str, Any]:
    """Those that its job was given; of a stage without a job, those that it would get."""
    launch = attempt.launch if attempt else None
    if launch:
        return {"profile": launch.profile, "executor": launch.executor.value, "given": True} | (
            _described(launch.resources)
        )
    name = profile_name()
    try:
        profile = load_profile(repository.root, name)
    except LockstepError:
        return {}
    of_stage = profile.resources(row["stage"].split("@")[0])
    return {"profile": name, "executor": profile.executor.value, "given": False} | (
        _described(of_stage)
    )


def _described(resources: Resources) -> dict[str, Any]:
    return {
        "nodes": resources.nodes,
        "tasks_per_node": resources.tasks_per_node,
        "gpus_per_node": resources.gpus_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "memory": resources.memory,
        "partition": resources.partition,
        "time_minutes": resources.time_minutes if resources.partition else None,
    }
