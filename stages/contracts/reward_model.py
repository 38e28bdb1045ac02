"""reward_model: a scalar reward learnt from pairs, from ratings, or from labelled steps."""

from enum import StrEnum

from pydantic import Field, model_validator

from stages.contracts.base import Processes, Stage, StageConfig
from stages.contracts.lora import LoraParams
from stages.contracts.objectives import RewardObjective, StepReward
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.precision import Precision


class Compared(StrEnum):
    """Where the two responses of a pair are compared."""

    EVERY_TOKEN = "every_token"
    LAST_TOKEN = "last_token"


class RewardStart(StrEnum):
    """What the reward model starts from."""

    BASE = "base"
    FOLDER = "folder"


class RewardModelParams(OptimizerParams):
    """Reward-model training."""

    start: RewardStart = Field(default=RewardStart.BASE, strict=False)
    """`base`: the base model with a new head. `folder`: the model in `folder`."""
    folder: str = "models"
    """A sequence classifier or causal LM that shares the base's tokenizer (start folder)."""
    label: int | str | None = None
    """Label of the classifier that is the reward, by number or name; null: its only one."""
    learning_rate: float = Field(default=2.0e-3, gt=0)
    epochs: int = Field(default=1, ge=0)
    """Passes over the data; 0: use the classifier in `folder` without training."""
    batch_size: int = Field(default=16, ge=1)
    """Pairs (or responses) in one optimizer step, over all ranks."""
    objective: RewardObjective = Field(default=RewardObjective.BRADLEY_TERRY, strict=False)
    """`bradley_terry` from pairs, `regression` from ratings, `process` from labelled steps."""
    compared: Compared = Field(default=Compared.EVERY_TOKEN, strict=False)
    """Bradley–Terry at `every_token` from the first that differs, or only at the `last_token`."""
    centre: float = Field(default=0.01, ge=0)
    """Weight of the centring term: the squared sum of a pair's two rewards."""
    step_separator: str = ";"
    """The token that ends a step of a response (process)."""
    step_reward: StepReward = Field(default=StepReward.MIN, strict=False)
    """`min`, `product` or `last` of the probabilities that the steps are right (process)."""

    @model_validator(mode="after")
    def _something_rates(self) -> "RewardModelParams":
        if self.start is RewardStart.BASE and not self.epochs:
            raise ValueError(
                "epochs is 0, but an untrained head gives every response the reward 0: set start "
                "to folder and name a finished reward model, or epochs to 1"
            )
        if self.start is RewardStart.BASE and self.label is not None:
            raise ValueError("label is for a classifier: set start to folder, or label to null")
        return self


class RewardModelConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    reward_model: RewardModelParams
    lora: LoraParams


REWARD_MODEL = Stage(
    name="reward_model",
    module="stages.reward_model",
    config=RewardModelConfig,
    inputs={
        "base": "artifacts/base",
        "start": "{reward_start}",
        "preferences": "artifacts/data/preferences.parquet",
        "feedback": "artifacts/data/feedback.parquet",
        "steps": "artifacts/data/steps.parquet",
        "held_out_preferences": "artifacts/data/held_out_preferences.parquet",
    },
    outs={"model": "artifacts/rewards/reward_model"},
    metrics="metrics/reward_model.json",
    processes=Processes.TOGETHER,
)
