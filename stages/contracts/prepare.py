"""prepare: the data, the tokenizer and the base model that everything else starts from."""

from typing import Literal

from pydantic import Field, model_validator

from stages.contracts.base import Section, Stage, StageConfig
from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision


class PrepareParams(Section):
    """Where prompts, demonstrations and preference pairs come from."""

    source: Literal["arithmetic", "files"] = "arithmetic"
    """`arithmetic` makes a verifiable task from the seed; `files` reads `folder`."""
    folder: str = "data"
    """Folder with the JSON lines that docs/data.md describes, when `source` is `files`."""
    digits: int = Field(default=2, ge=1, le=4)
    """Most digits of a number in the arithmetic task."""
    demonstrations: int = Field(default=3000, ge=1)
    """Number of demonstrations that SFT learns from."""
    demonstration_accuracy: float = Field(default=0.65, ge=0, le=1)
    """Share of the demonstrations whose answer is right; the rest carry typical slips."""
    preferences: int = Field(default=3200, ge=1)
    """Number of preference pairs that the reward model learns from."""
    prompts: int = Field(default=2000, ge=1)
    """Number of prompts that rollouts draw from."""
    held_out: int = Field(default=256, ge=1)
    """Number of prompts, and of preference pairs, kept from every training set for evaluation."""

    @model_validator(mode="after")
    def _enough_problems(self) -> "PrepareParams":
        if self.source == "arithmetic":
            # Problems are unordered pairs: 3+5 held out keeps 5+3 out of training.
            numbers = 10**self.digits
            distinct = numbers * (numbers + 1) // 2
            if distinct < 4 * self.held_out:
                raise ValueError(
                    f"held_out {self.held_out} leaves too few of the {distinct} problems with "
                    f"{self.digits} digits for training: raise digits or lower held_out"
                )
        return self


class PrepareConfig(StageConfig):
    """What prepare sees of params.yaml."""

    seed: int
    precision: Precision = Field(strict=False)
    prepare: PrepareParams
    model: ModelParams


PREPARE = Stage(
    name="prepare",
    module="stages.prepare",
    config=PrepareConfig,
    inputs={"files": "{files}", "base_model": "{base_model}"},
    outs={
        "base": "artifacts/base",
        "demonstrations": "artifacts/data/demonstrations.parquet",
        "preferences": "artifacts/data/preferences.parquet",
        "feedback": "artifacts/data/feedback.parquet",
        "steps": "artifacts/data/steps.parquet",
        "prompts": "artifacts/data/prompts.parquet",
        "held_out": "artifacts/data/held_out.parquet",
        "held_out_preferences": "artifacts/data/held_out_preferences.parquet",
        "verifier": "artifacts/rewards/verifier",
    },
    metrics="metrics/prepare.json",
)
