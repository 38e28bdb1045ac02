"""reward_model: a scalar reward learnt from preference pairs."""

from pydantic import Field

from stages.contracts.base import Processes, Stage, StageConfig
from stages.contracts.optimizer import OptimizerParams


class RewardModelParams(OptimizerParams):
    """Reward-model training (Bradley–Terry)."""

    learning_rate: float = Field(default=2.0e-3, gt=0)
    """Peak learning rate."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the preference pairs."""
    batch_size: int = Field(default=16, ge=1)
    """Pairs in one optimizer step, over all ranks."""
    centre: float = Field(default=0.01, ge=0)
    """Weight of the term that pulls the sum of a pair's two rewards towards zero."""


class RewardModelConfig(StageConfig):
    """What reward_model sees of params.yaml."""

    seed: int
    reward_model: RewardModelParams


REWARD_MODEL = Stage(
    name="reward_model",
    module="stages.reward_model",
    config=RewardModelConfig,
    inputs={
        "base": "artifacts/base",
        "preferences": "artifacts/data/preferences.parquet",
        "held_out_preferences": "artifacts/data/held_out_preferences.parquet",
    },
    outs={"model": "artifacts/rewards/reward_model"},
    metrics="metrics/reward_model.json",
    processes=Processes.TOGETHER,
)
