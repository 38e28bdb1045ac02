"""evaluate: a policy on the held-out prompts, every policy of the family alike."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from stages.contracts.base import Over, Section, Stage, StageConfig
from stages.contracts.episodes import EpisodeParams
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine, Tools


class EvaluateParams(Section):
    """Measuring a policy on the held-out prompts."""

    samples: int = Field(default=4, ge=1)
    """Responses sampled for each held-out prompt, beside the greedy one."""
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 4])
    """The k of each pass@k (one of k samples is right); at most `samples`."""
    correct: str = "verifier"
    """Source that judges correctness: `verifier`, `reward_model` or a name in `rewards`."""
    correct_at: float = 0.5
    """A response is right if that source's reward is at least this."""
    task_metrics: int = Field(default=24, ge=0)
    """Number of tasks with metrics of their own, largest first; a table has all of them."""


class EvaluateConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    evaluate: EvaluateParams
    reward: str = Field(alias="rl.reward")
    max_new_tokens: int = Field(alias="rollout.max_new_tokens")
    temperature: float = Field(alias="rollout.temperature")
    engine: Engine = Field(alias="rollout.engine", strict=False)
    batch_size: int = Field(alias="rollout.batch_size")
    environment: str | None = Field(alias="rollout.environment")
    tools: Tools = Field(alias="rollout.tools", strict=False)
    max_turns: int = Field(alias="rollout.max_turns")
    max_observation_tokens: int = Field(alias="rollout.max_observation_tokens")
    episodes: EpisodeParams


AGAINST = {"reference_evaluation": "artifacts/evaluations/sft"}
"""What the win rate compares with: responses of the reference that were scored already."""


def _evaluation(
    name: str, over: Over, binding: Mapping[str, str], compared: Mapping[str, str] = AGAINST
) -> Stage:
    return Stage(
        name=name,
        module="stages.evaluate",
        config=EvaluateConfig,
        inputs={
            "policy": "artifacts/policies/{key}/model",
            "reference": "artifacts/policies/sft/model",
            "reward": "artifacts/rewards/{reward}",
            "held_out": "artifacts/data/held_out.parquet",
            "judge": "artifacts/rewards/{correct}",
            "environments": "{environments}",
            "tool_record": "{tool_record}",
            **compared,
        },
        outs={
            "evaluation": "artifacts/evaluations/{key}",
            "evaluation_answers": "artifacts/tool_answers/evaluations/{key}.parquet",
        },
        metrics="metrics/evaluations/{key}.json",
        reads=True,
        over=over,
        binding=binding,
    )


EVALUATE_SFT = _evaluation("evaluate_sft", Over.ONCE, {"key": "sft"}, {})
EVALUATE_PREFERENCE = _evaluation("evaluate_preference", Over.PREFERENCES, {})
EVALUATE_ONLINE = _evaluation("evaluate_online", Over.ONLINE, {})
EVALUATE = _evaluation("evaluate", Over.ITERATIONS, {})
EVALUATIONS = tuple(
    stage.name for stage in (EVALUATE_SFT, EVALUATE_PREFERENCE, EVALUATE_ONLINE, EVALUATE)
)
