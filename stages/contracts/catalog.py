"""Every stage of the graph, and how its path templates are filled in."""

from dataclasses import dataclass

from stages.contracts.base import Over, Stage, StageConfig
from stages.contracts.evaluate import EVALUATE, EVALUATE_SFT
from stages.contracts.params import Params
from stages.contracts.policy_update import POLICY_UPDATE
from stages.contracts.prepare import PREPARE
from stages.contracts.report import REPORT
from stages.contracts.reward_model import REWARD_MODEL
from stages.contracts.rollout import ROLLOUT
from stages.contracts.score import SCORE
from stages.contracts.sft import SFT

STAGES = {
    stage.name: stage
    for stage in (
        PREPARE,
        SFT,
        REWARD_MODEL,
        ROLLOUT,
        SCORE,
        POLICY_UPDATE,
        EVALUATE_SFT,
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
        return (
            f"{self.stage.name}@{self.key}"
            if self.stage.over is Over.ITERATIONS
            else self.stage.name
        )


def bind(address: str, params: Params) -> BoundStage:
    """Resolve `sft` or `rollout@iter_001` against the params; ValueError says what is unknown."""
    name, _, iteration = address.partition("@")
    if name not in STAGES:
        raise ValueError(f"no stage is called {name!r}; there are {', '.join(STAGES)}")
    stage = STAGES[name]
    binding = {
        "reward": params.rl.reward.value,
        "files": params.prepare.folder,
        "base_model": params.model.folder,
        **stage.binding,
    }
    if stage.over is Over.ITERATIONS:
        if iteration not in params.rl.iterations:
            known = ", ".join(params.rl.iterations)
            raise ValueError(f"rl.iterations has no {iteration!r}; it has {known}")
        binding |= {"key": iteration, "policy": params.rl.iterations[iteration].policy}
    elif iteration:
        raise ValueError(f"{name} is not repeated over iterations; call it without '@{iteration}'")
    return BoundStage(
        stage=stage,
        key=binding.get("key"),
        config=stage.config.from_params(params),
        inputs={name: path.format(**binding) for name, path in stage.inputs.items()},
        outs={name: path.format(**binding) for name, path in stage.outs.items()},
        metrics=stage.metrics.format(**binding),
    )


def bind_all(params: Params) -> list[BoundStage]:
    """Every node of the graph under these params, in the order of the catalog."""
    return [
        bind(f"{stage.name}@{key}" if key else stage.name, params)
        for stage in STAGES.values()
        for key in (params.rl.iterations if stage.over is Over.ITERATIONS else [""])
    ]
