"""prepare: the data, the tokenizer and the base model that everything else starts from."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from stages.contracts.base import Section, Stage, StageConfig
from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision
from stages.contracts.sources import TOOLS_SUFFIX, Role, Sources


class Duplicates(StrEnum):
    """Which rows of a role count as there already."""

    KEEP = "keep"
    EXACT = "exact"
    NORMALISED = "normalised"


class Unfit(StrEnum):
    """What happens to a row that cannot be used."""

    DROP = "drop"
    REFUSE = "refuse"


class Turns(StrEnum):
    """Which of an assistant's turns a demonstration teaches."""

    ALL = "all"
    LAST = "last"


class PrepareParams(Section):
    """Where prompts, demonstrations and preference pairs come from."""

    source: Literal["arithmetic", "files"] = "arithmetic"
    """`arithmetic`: a verifiable task made from the seed. `files`: the data in `folder`."""
    folder: str = "data"
    """Folder of the data if `source` is `files`: json, jsonl, csv, tsv, parquet or arrow."""
    files: Sources = Field(default_factory=dict)
    """Data sources of each role; empty: files named after their role, such as `prompts.csv`."""
    duplicates: Duplicates = Field(default=Duplicates.EXACT, strict=False)
    """Which duplicate rows of a role are dropped: `exact`, `normalised` ones too, or none."""
    contamination: Unfit = Field(default=Unfit.DROP, strict=False)
    """What to do with a training row whose prompt is held out."""
    too_long: Unfit = Field(default=Unfit.DROP, strict=False)
    """What to do with a row that is longer than `model.max_length`."""
    bad_rows: Unfit = Field(default=Unfit.REFUSE, strict=False)
    """What to do with a row that does not fit its format."""
    tools: str | None = None
    """File in `folder` (*.tools.json) with the tools that prompts offer; null: only their own."""
    turns: Turns = Field(default=Turns.ALL, strict=False)
    """Which assistant turns of a demonstration are learnt."""
    ranked_pairs: int = Field(default=0, ge=0)
    """Largest number of pairs from one row of ranked responses, best ones first; 0: all."""
    digits: int = Field(default=2, ge=1, le=4)
    """Largest number of digits of a number in the arithmetic task."""
    demonstrations: int = Field(default=3000, ge=1)
    """Number of demonstrations that SFT learns from."""
    demonstration_accuracy: float = Field(default=0.65, ge=0, le=1)
    """Share of demonstrations whose answer is right; the others contain typical mistakes."""
    preferences: int = Field(default=3200, ge=1)
    """Number of preference pairs that the reward model learns from."""
    prompts: int = Field(default=2000, ge=1)
    """Number of prompts that rollouts draw from."""
    held_out: int = Field(default=256, ge=0)
    """Number of prompts, and of preference pairs, held out for evaluation."""

    @model_validator(mode="after")
    def _prompts_are_there_once(self) -> "PrepareParams":
        for role, sources in self.files.items():
            for source in sources if role.asks else ():
                if source.weight > 1:
                    raise ValueError(
                        f"files.{role}: {source.label} has weight {source.weight}, but each prompt "
                        "is there once: weights up to 1 thin them out"
                    )
        return self

    @model_validator(mode="after")
    def _tools_are_a_file_beside_the_rows(self) -> "PrepareParams":
        name = self.tools
        if name is None:
            return self
        if "/" in name or not name.endswith(TOOLS_SUFFIX) or name.partition(".")[0] in [*Role]:
            raise ValueError(
                f"tools is {name!r}: name a file in the data's folder that ends in "
                f"{TOOLS_SUFFIX} and is not called after a role, such as search{TOOLS_SUFFIX}"
            )
        return self

    @model_validator(mode="after")
    def _enough_problems(self) -> "PrepareParams":
        if self.source == "arithmetic":
            if not self.held_out:
                raise ValueError("held_out is 0: hold some of the problems out")
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
        "data_report": "artifacts/data/report.json",
        "verifier": "artifacts/rewards/verifier",
    },
    metrics="metrics/prepare.json",
)
