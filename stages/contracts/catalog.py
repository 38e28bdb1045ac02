"""Every stage of the graph, and how its path templates are filled in."""

from collections.abc import Mapping
from dataclasses import dataclass

from stages.contracts.base import Over, Stage, StageConfig
from stages.contracts.evaluate import (
    EVALUATE,
    EVALUATE_ONLINE,
    EVALUATE_PREFERENCE,
    EVALUATE_SFT,
)
from stages.contracts.online import ONLINE
from stages.contracts.params import Params
from stages.contracts.policy_update import POLICY_UPDATE
from stages.contracts.preference import PREFERENCE, REFERENCE_LOGPROBS
from stages.contracts.prepare import PREPARE
from stages.contracts.report import REPORT
from stages.contracts.reward_model import REWARD_MODEL
from stages.contracts.rewards import REWARD_SOURCE
from stages.contracts.rl import Start
from stages.contracts.rollout import ROLLOUT
from stages.contracts.score import SCORE
from stages.contracts.sft import SFT

STAGES = {
    stage.name: stage
    for stage in (
        PREPARE,
        SFT,
        REWARD_MODEL,
        REWARD_SOURCE,
        REFERENCE_LOGPROBS,
        PREFERENCE,
        ROLLOUT,
        SCORE,
        POLICY_UPDATE,
        ONLINE,
        EVALUATE_SFT,
        EVALUATE_PREFERENCE,
        EVALUATE_ONLINE,
        EVALUATE,
        REPORT,
    )
}


@dataclass(frozen=True)
class BoundStage:
    """A stage with its paths filled in: one node of the graph."""

    stage: Stage
    key: str | None
    config: StageConfig
    inputs: dict[str, str]
    outs: dict[str, str]
    metrics: str

    @property
    def address(self) -> str:
        """The stage's name as DVC spells it: `sft`, `rollout@iter_001`."""
        once = self.stage.over is Over.ONCE
        return self.stage.name if once else f"{self.stage.name}@{self.key}"


def bind(address: str, params: Params) -> BoundStage:
    """Resolve `sft` or `rollout@iter_001` against the params; ValueError says what is unknown."""
    name, _, policy = address.partition("@")
    if name not in STAGES:
        raise ValueError(f"no stage is called {name!r}; there are {', '.join(STAGES)}")
    stage = STAGES[name]
    binding = {
        "reward": params.rl.reward,
        "correct": params.evaluate.correct,
        "functions": params.score.folder,
        "files": params.prepare.folder,
        "base_model": params.model.folder,
        "prompts": params.rollout.source.value,
        "environments": params.rollout.environments,
        "tool_record": params.rollout.tool_record,
        "teacher": params.rl.teacher,
        "reward_start": params.reward_model.folder,
        **stage.binding,
    }
    repeated = repeated_over(stage, params)
    if policy and stage.over is Over.ONCE:
        raise ValueError(f"{name} is not repeated over policies; call it without '@{policy}'")
    if stage.over is not Over.ONCE:
        if policy not in repeated:
            known = ", ".join(repeated) or "nothing"
            where = "" if stage.over is Over.REWARDS else "rl."
            raise ValueError(f"{where}{stage.over} has no {policy!r}; it has {known}")
        binding |= {"key": policy}
        if (start := repeated[policy]) is not None:
            binding |= {"policy": start.policy}
    return BoundStage(
        stage=stage,
        key=binding.get("key"),
        config=stage.config.from_params(params, binding.get("key")),
        inputs={name: path.format(**binding) for name, path in stage.inputs.items()},
        outs={name: path.format(**binding) for name, path in stage.outs.items()},
        metrics=stage.metrics.format(**binding),
    )


def bind_all(params: Params) -> list[BoundStage]:
    """Every node of the graph under these params, in the order of the catalog."""
    return [
        bind(f"{stage.name}@{key}" if key else stage.name, params)
        for stage in STAGES.values()
        for key in ([""] if stage.over is Over.ONCE else repeated_over(stage, params))
    ]


def repeated_over(stage: Stage, params: Params) -> Mapping[str, Start | None]:
    """What the stage is repeated over: policies, with what each starts from, or reward sources."""
    policies: Mapping[Over, Mapping[str, Start | None]] = {
        Over.ITERATIONS: params.rl.iterations,
        Over.PREFERENCES: params.rl.preferences,
        Over.ONLINE: params.rl.online,
        Over.REWARDS: dict.fromkeys(params.rewards),
    }
    return policies.get(stage.over, {})
