"""The report's data: metrics and samples of the policies that params.yaml names.

Folders may hold leftovers of iterations that were taken out of params.yaml; they are never read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.data.artifacts import read_parquet
from stages.data.schema import EvaluationTaskRow
from stages.evaluation import folder
from stages.evaluation.answers import Answered
from stages.reporting.family import ROOT, Family

Metrics = Mapping[str, float]

ITERATION_STAGES = ("rollout", "score", "policy_update")
PREFERENCE_STAGES = ("preference",)
ONLINE_STAGES = ("online",)
_NEEDED = ("reward_mean", "kl_to_reference", "entropy")


@dataclass(frozen=True)
class Evidence:
    evaluations: Mapping[str, Metrics]
    """Held-out metrics of each policy, `sft` first."""
    training: Mapping[str, Mapping[str, Metrics]]
    """Metrics of the stages that made each policy."""
    answered: Mapping[str, list[Answered]]
    """Greedy responses of each policy to the held-out prompts."""
    tasks: Mapping[str, Sequence[Mapping[str, Any]]]
    """Numbers of the SFT policy and of the final one for each task; none where there is none."""
    sft: Metrics
    prepare: Metrics
    reward: Metrics
    """What is known of the reward source; empty where there are no pairs that it can rank."""

    @property
    def pairwise_accuracy(self) -> float | None:
        return self.reward.get("pairwise_accuracy")


def read(inputs: Mapping[str, Path], family: Family) -> Evidence:
    """Read what `family` names from the stage's inputs; StageError names what is missing."""
    evaluations = {
        policy: _metrics(inputs["evaluation_metrics"] / f"{policy}.json", _NEEDED)
        for policy in family.policies
    }
    training = {
        policy: {
            stage: _metrics(inputs["iterations"] / policy / f"{stage}.json")
            for stage in _makers(policy, family)
        }
        for policy in family.parents
    }
    return Evidence(
        evaluations=evaluations,
        training=training,
        answered={
            policy: folder.read_greedy(_existing(inputs["evaluations"] / policy / folder.GREEDY))
            for policy in family.policies
        },
        tasks={
            policy: read_parquet(
                _existing(inputs["evaluations"] / policy / folder.TASKS), EvaluationTaskRow
            )
            for policy in (ROOT, family.final)
        },
        sft=_metrics(inputs["sft"]),
        prepare=_metrics(inputs["prepare"]),
        reward=_metrics(inputs["reward"] / "quality.json"),
    )


def _makers(policy: str, family: Family) -> tuple[str, ...]:
    if policy in family.preferences:
        return PREFERENCE_STAGES
    return ONLINE_STAGES if policy in family.online else ITERATION_STAGES


def _metrics(path: Path, needed: tuple[str, ...] = ()) -> Metrics:
    try:
        content = json.loads(_existing(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise StageError(f"{path} is not JSON ({error}): delete it and run `dvc repro`") from error
    if not isinstance(content, dict):
        raise StageError(f"{path} is not a mapping of metrics: delete it and run `dvc repro`")
    # By type: true and false are no numbers.
    numbers = {name: float(v) for name, v in content.items() if type(v) in (int, float)}
    for name in needed:
        if name not in numbers:
            raise StageError(f"{path} has no {name!r}: delete it and run `dvc repro`")
    return numbers


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise StageError(f"{path} is missing: run `dvc repro` to make it again")
    return path
