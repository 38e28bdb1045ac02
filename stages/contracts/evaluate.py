"""evaluate: a policy on the held-out prompts, every policy of the family alike."""

from collections.abc import Mapping

from pydantic import Field

from stages.contracts.base import Over, Section, Stage, StageConfig
from stages.contracts.precision import Precision
from stages.contracts.rl import Reward
from stages.contracts.rollout import Engine


class EvaluateParams(Section):
    """Measuring a policy on the held-out prompts."""

    samples: int = Field(default=4, ge=1)
    """Responses sampled for each held-out prompt, beside the greedy one."""


class EvaluateConfig(StageConfig):
    """What evaluate sees of params.yaml."""

    seed: int
    precision: Precision = Field(strict=False)
    evaluate: EvaluateParams
    reward: Reward = Field(alias="rl.reward", strict=False)
    max_new_tokens: int = Field(alias="rollout.max_new_tokens")
    temperature: float = Field(alias="rollout.temperature")
    engine: Engine = Field(alias="rollout.engine", strict=False)
    batch_size: int = Field(alias="rollout.batch_size")


def _evaluation(name: str, over: Over, binding: Mapping[str, str]) -> Stage:
    return Stage(
        name=name,
        module="stages.evaluate",
        config=EvaluateConfig,
        inputs={
            "policy": "artifacts/policies/{key}/model",
            "reference": "artifacts/policies/sft/model",
            "reward": "artifacts/rewards/{reward}",
            "held_out": "artifacts/data/held_out.parquet",
            "verifier": "artifacts/rewards/verifier",
        },
        outs={"evaluation": "artifacts/evaluations/{key}"},
        metrics="metrics/evaluations/{key}.json",
        over=over,
        binding=binding,
    )


EVALUATE_SFT = _evaluation("evaluate_sft", Over.ONCE, {"key": "sft"})
EVALUATE_PREFERENCE = _evaluation("evaluate_preference", Over.PREFERENCES, {})
EVALUATE_ONLINE = _evaluation("evaluate_online", Over.ONLINE, {})
EVALUATE = _evaluation("evaluate", Over.ITERATIONS, {})
