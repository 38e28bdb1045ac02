"""What the numbers of a clone give reason to warn of, stage by stage.

The judgement is `stages.health`'s. Here are the numbers: held-out ones from the metrics files of
the workspace, and of a policy in the making the last steps of its job's metrics.jsonl. A file that
dvc.lock knows to be of earlier params, or of a policy that was replaced since, counts as not there:
numbers of two runs are never compared. A driver
asks ten times a second, so nothing is looked at more than once a second, nor read again unless it
has changed, and of a file that grows only the ends are read. A look never fails: no run is to end
because of it.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipelines.config.params import PARAMS_FILE, load_params
from pipelines.config.strict_yaml import load_yaml
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.dvc_repo.lock_state import current_stages
from pipelines.ledger.entry import Entry
from stages.contracts.catalog import bind
from stages.contracts.evaluate import EVALUATE, EVALUATIONS
from stages.contracts.online import ONLINE
from stages.contracts.params import Params
from stages.contracts.policy_update import POLICY_UPDATE
from stages.contracts.preference import PREFERENCE
from stages.health import Reading, Symptom, ancestry, judge

INTERVAL_S = 1.0
RECENT = 5
"""How many steps a number of a running job is the mean of."""
_CHUNK = 64 * 1024
_MAKERS = (POLICY_UPDATE.name, PREFERENCE.name, ONLINE.name)
"""Stages that make a policy; what they log at each step is of the policy as it is by then."""
_NOTHING: dict[str, Any] = {}
_STEP_METRICS = ("entropy", "kl_to_reference")

T = TypeVar("T")
Metrics = dict[str, float]


@dataclass(frozen=True)
class Steps:
    """The ends of a job's curves."""

    first: Metrics
    last: Metrics


class Health:
    """Judges the stages of a clone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: dict[str, tuple[float, tuple[Symptom, ...]]] = {}
        self._files: dict[tuple[Path, Any], tuple[tuple[int, int, int], Any]] = {}
        self._judged: tuple[Any, Any, Mapping[str, str]] | None = None
        """dvc.lock and params.yaml, and what is stale by them."""

    def of(self, address: str, entry: Entry | None, *, now: bool = False) -> tuple[Symptom, ...]:
        """What to warn of at a stage; `entry` is its latest, whose job may be running."""
        asked, symptoms = self._kept.get(address, (0.0, ()))
        clock = time.monotonic()
        if not now and address in self._kept and clock - asked < INTERVAL_S:
            return symptoms
        try:
            symptoms = self._judge(address, entry)
        except Exception:
            # A file in the middle of its making, or params.yaml of its editing; whatever it is, it
            # is for who runs the stage to meet, and no reason to end a driver.
            symptoms = ()
        self._kept[address] = (clock, symptoms)
        return symptoms

    def _judge(self, address: str, entry: Entry | None) -> tuple[Symptom, ...]:
        name = address.partition("@")[0]
        if name not in (*EVALUATIONS, *_MAKERS):
            return ()
        params = self._read(self._root / PARAMS_FILE, _params)
        if params is None:
            return ()
        bound = bind(address, params)
        assert bound.key is not None
        alive = entry is not None and entry.state().alive
        if name in EVALUATIONS:
            return () if alive else judge(self._line(bound.key, params), params.warn)
        summary = {} if alive else self.metrics(bound.metrics)
        steps = self._steps(entry) if _made(entry, summary) else Steps({}, {})
        own = steps.last | _only(summary, ["zero_variance_share"])
        if not alive:
            own |= _only(self._evaluation(bound.key).metrics, ["accuracy_sampled"])
        line = [*self._line(bound.key, params)[:-1], Reading(bound.key, own)]
        # Elsewhere the steps' entropy is not of the policy's own samples: like with like.
        comparable = (
            name in (POLICY_UPDATE.name, ONLINE.name) and params.rl.algorithm.is_policy_gradient
        )
        if not comparable or not any(reading.get("entropy") for reading in line[:-1]):
            line = _from_the_start(line, steps.first)
        return judge(line, params.warn)

    def _line(self, policy: str, params: Params) -> list[Reading]:
        return [self._evaluation(name) for name in ancestry(policy, params.rl.family)]

    def _evaluation(self, policy: str) -> Reading:
        return Reading(policy, self.metrics(EVALUATE.metrics.format(key=policy)))

    def metrics(self, path: str) -> Metrics:
        """The numbers of a summary in the workspace; none where they are of an earlier run."""
        summary = self._read(self._root / path, _numbers)
        if summary is None or summary[1] == self._stale_hashes().get(path):
            return {}
        return summary[0]

    def _stale_hashes(self) -> Mapping[str, str]:
        """What dvc.lock has of stages that it does not vouch for any more, by path."""
        lock = self._read(self._root / "dvc.lock", _lock) or _NOTHING
        params = self._read(self._root / PARAMS_FILE, load_yaml) or _NOTHING
        if self._judged is None or self._judged[0] is not lock or self._judged[1] is not params:
            stale = lock.keys() - current_stages(lock, params)
            outs = (out for stage in stale for out in lock[stage].get("outs") or ())
            self._judged = (lock, params, {out["path"]: out.get("md5", "") for out in outs})
        return self._judged[2]

    def _steps(self, entry: Entry | None) -> Steps:
        steps = self._read(entry.folder / "metrics.jsonl", _ends) if entry is not None else None
        return steps or Steps({}, {})

    def _read(self, path: Path, reader: Callable[[Path], T]) -> T | None:
        """What the reader makes of the file, from memory while the file is the same."""
        try:
            stat = path.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            known, value = self._files.get((path, reader), (None, None))
            if known != stamp:
                value = reader(path)
                self._files[path, reader] = (stamp, value)
        except FileNotFoundError:
            return None
        kept: T | None = value
        return kept


def _made(entry: Entry | None, summary: Metrics) -> bool:
    """Whether the entry is what the workspace has, and not another that was restored since."""
    record = entry.record if entry is not None else None
    return record is None or record.metrics == summary


def _from_the_start(line: Sequence[Reading], first: Metrics) -> list[Reading]:
    """The line with the entropy that the job itself began with, and no other before its own."""
    *ancestors, own = line
    bare = [
        Reading(reading.policy, {k: v for k, v in reading.metrics.items() if k != "entropy"})
        for reading in ancestors
    ]
    parent = Reading(bare[-1].policy, {**bare[-1].metrics, **_only(first, ["entropy"])})
    return [*bare[:-1], parent, own]


def _params(path: Path) -> Params:
    return load_params(path.parent)


def _lock(path: Path) -> dict[str, Any]:
    return read_stages(path.parent)


def _numbers(path: Path) -> tuple[Metrics, str]:
    """The metrics of a file, and the file's hash."""
    content = path.read_bytes()
    values = json.loads(content)
    numbers = values.items() if isinstance(values, dict) else ()
    metrics = {name: float(value) for name, value in numbers if isinstance(value, int | float)}
    return metrics, hashlib.md5(content).hexdigest()


def _ends(path: Path) -> Steps:
    """The means of the first and of the last steps; nothing while they are too few to tell."""
    with path.open("rb") as file:
        head = file.read(_CHUNK)
        size = file.seek(0, 2)
        file.seek(max(0, size - _CHUNK))
        tail = file.read()
    first, last = head.split(b"\n")[:-1], tail.split(b"\n")[:-1]
    if size > _CHUNK:
        last = last[1:]
    return Steps(_means(first[:RECENT]), _means(last[-RECENT:]))


def _means(lines: Sequence[bytes]) -> Metrics:
    if len(lines) < RECENT:
        return {}
    rows: list[Mapping[str, float]] = [json.loads(line)["metrics"] for line in lines]
    return {
        name: statistics.fmean(row[name] for row in rows)
        for name in _STEP_METRICS
        if all(name in row for row in rows)
    }


def _only(metrics: Mapping[str, float], names: Iterable[str]) -> Metrics:
    return {name: metrics[name] for name in names if name in metrics}
