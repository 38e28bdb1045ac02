"""score: rewards for the rollouts, and the reference policy's log-probs of them."""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.rl import Reward


class ScoreParams(Section):
    """Turning responses into rewards."""

    missing_eos_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward of a response that was cut before it ended."""


class ScoreConfig(StageConfig):
    """What score sees of params.yaml."""

    score: ScoreParams
    reward: Reward = Field(alias="rl.reward", strict=False)
    temperature: float = Field(alias="rollout.temperature")


SCORE = Stage(
    name="score",
    module="stages.score",
    config=ScoreConfig,
    inputs={
        "rollouts": "artifacts/rollouts/{key}.parquet",
        "reward": "artifacts/rewards/{reward}",
        "reference": "artifacts/policies/sft/model",
    },
    outs={"scores": "artifacts/scores/{key}.parquet"},
    metrics="metrics/iterations/{key}/score.json",
    processes=Processes.SHARDS,
    over=Over.ITERATIONS,
)
