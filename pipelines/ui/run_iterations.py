"""The curves over the iterations: the summaries of each policy, along the branches of the family.

They are the metrics files of the workspace, so a point is there as soon as a stage has ended. Like
the warnings, they leave out a file that dvc.lock knows to be of an earlier run.
"""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.tracking.health import Health
from pipelines.ui.run_rows import Row
from stages.contracts.evaluate import EVALUATE, EVALUATIONS
from stages.contracts.online import ONLINE
from stages.contracts.policy_update import POLICY_UPDATE
from stages.contracts.preference import PREFERENCE
from stages.contracts.rollout import ROLLOUT
from stages.contracts.score import SCORE
from stages.reporting.family import ROOT, Branch, Family
from stages.reporting.vocabulary import describe

HELD_OUT, IN_TRAINING = "On held-out prompts", "In training"
CHARTS: Mapping[str, Sequence[Sequence[str]]] = {
    HELD_OUT: (
        ("reward_mean",),
        ("accuracy", "accuracy_sampled"),
        ("win_rate", "win_rate_sampled"),
        ("kl_to_reference",),
        ("entropy",),
        ("response_length",),
        ("truncation_rate",),
    ),
    IN_TRAINING: (
        ("reward_mean",),
        ("approx_kl",),
        ("entropy",),
        ("loss",),
        ("policy_loss",),
        ("value_loss",),
        ("preference_accuracy",),
        ("zero_variance_share",),
        ("explained_variance",),
        ("grad_norm",),
    ),
}
"""The metrics of each chart: the second one is dashed."""
MAKERS = (ROLLOUT, SCORE, POLICY_UPDATE, PREFERENCE, ONLINE)
"""Whose numbers are of training; where two have one, the later counts."""

Numbers = Mapping[str, Mapping[str, float]]
"""By policy."""


@dataclass(frozen=True)
class Drawn:
    """A line of a chart: one metric along one branch."""

    name: str
    dashed: bool
    branch: int
    points: tuple[tuple[int, float], ...]
    """By the number of iterations after SFT."""


class Iterations:
    """Reads the files; shared by every page."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._health = Health(root)
        self._lock = threading.Lock()

    def groups(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """The charts that have a line; none while params.yaml cannot be read."""
        try:
            family = Family(load_params(self._root).rl.family)
        except LockstepError:
            return []  # the page says what is wrong with it
        with self._lock:
            numbers = {HELD_OUT: self._held_out(family), IN_TRAINING: self._in_training(family)}
        judged = warnings(rows)
        groups = [
            {"title": title, "charts": charts(family, numbers[title], judged[title], names)}
            for title, names in CHARTS.items()
        ]
        return [group for group in groups if group["charts"]]

    def _held_out(self, family: Family) -> Numbers:
        return {
            policy: self._health.metrics(EVALUATE.metrics.format(key=policy))
            for policy in family.policies
        }

    def _in_training(self, family: Family) -> Numbers:
        return {
            policy: {
                name: value
                for maker in MAKERS
                for name, value in self._health.metrics(maker.metrics.format(key=policy)).items()
            }
            for policy in family.parents
        }


def charts(
    family: Family,
    numbers: Numbers,
    judged: Mapping[str, list[dict[str, Any]]],
    wanted: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """Those whose metric at least two policies of a branch have."""
    branches, depths, found = family.branches(), _depths(family), []
    for names in wanted:
        lines = [
            line for name in names for line in lines_of(branches, depths, numbers, name, names)
        ]
        if any(len(line.points) > 1 for line in lines):
            metric = describe(names[0])
            found.append(
                {
                    "name": names[0],
                    "title": metric.label,
                    "meaning": metric.meaning,
                    "lines": [asdict(line) for line in lines],
                    "warnings": judged.get(names[0], []),
                }
            )
    return found


def lines_of(
    branches: Sequence[Branch],
    depths: Mapping[str, int],
    numbers: Numbers,
    name: str,
    names: Sequence[str],
) -> list[Drawn]:
    """A metric of a chart, along every branch that has it."""
    lines = []
    for index, branch in enumerate(branches):
        own = [(policy, numbers.get(policy, {}).get(name)) for policy in branch.policies]
        points = tuple(
            (depths[policy], value)
            for policy, value in own
            if value is not None and math.isfinite(value)
        )
        words = [branch.leaf] if len(branches) > 1 else []
        if len(names) > 1:
            words.append("sampled" if name.endswith("_sampled") else "greedy")
        label = " ".join(words) or describe(name).label
        lines.append(Drawn(label, name != names[0], index, points))
    return [line for line in lines if line.points]


def _depths(family: Family) -> dict[str, int]:
    """How many iterations each policy has behind it, in one pass: there may be hundreds."""
    depths = {ROOT: 0}
    for policy, parent in family.parents.items():
        depths[policy] = depths[parent] + 1
    return depths


def warnings(rows: Iterable[Row]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What is warned of, by the chart that shows it: of each kind that of the last policy."""
    found: dict[str, dict[str, dict[str, Row]]] = {HELD_OUT: {}, IN_TRAINING: {}}
    for row in rows:
        title = HELD_OUT if row["stage"].partition("@")[0] in EVALUATIONS else IN_TRAINING
        for warning in row["warnings"]:
            found[title].setdefault(warning["metric"], {})[warning["kind"]] = warning
    return {
        title: {metric: list(kinds.values()) for metric, kinds in by_metric.items()}
        for title, by_metric in found.items()
    }
