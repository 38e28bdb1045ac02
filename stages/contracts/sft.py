"""sft: supervised fine-tuning of the base model on the demonstrations."""

from pydantic import Field

from stages.contracts.base import Processes, Stage, StageConfig
from stages.contracts.lora import LoraParams
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.precision import Precision


class SftParams(OptimizerParams):
    """Supervised fine-tuning."""

    learning_rate: float = Field(default=3.0e-3, gt=0)
    epochs: int = Field(default=4, ge=0)
    """Passes over the demonstrations; 0: keep the base model, if it can chat already."""
    batch_size: int = Field(default=32, ge=1)
    """Demonstrations in one optimizer step, over all ranks."""


class SftConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    sft: SftParams
    lora: LoraParams


SFT = Stage(
    name="sft",
    module="stages.sft",
    config=SftConfig,
    inputs={
        "base": "artifacts/base",
        "demonstrations": "artifacts/data/demonstrations.parquet",
    },
    outs={
        "model": "artifacts/policies/sft/model",
        "state": "artifacts/policies/sft/state",
    },
    metrics="metrics/sft.json",
    processes=Processes.TOGETHER,
)
