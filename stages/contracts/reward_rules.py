"""Built-in rules as sources of rewards: each scores one response."""

import re
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.contracts.base import Section


class Rule(Section):
    """What every built-in rule has: it looks at one response at a time, in a process of its own."""

    timeout: float = Field(default=10.0, gt=0)
    """CPU time limit of one response, in seconds."""
    concurrency: int = Field(default=1, ge=1)
    """Processes that score responses in parallel; changes no reward."""

    @property
    def needs_answer(self) -> bool:
        """Whether a response is compared with the `answer` of its row."""
        return False


class CorrectnessRule(Rule):
    """A rule that checks whether a response is right."""

    must_end: bool = True
    """Whether a truncated response counts as wrong."""
    on_timeout: float | None = None
    """Reward of a response that takes longer than `timeout`; null: the stage fails."""


class Maths(CorrectnessRule):
    """1 where the response's result equals the row's `answer` as mathematics, else 0."""

    kind: Literal["maths"]
    """`maths`"""
    on_timeout: float | None = 0.0

    @property
    def needs_answer(self) -> bool:
        return True


class MultipleChoice(CorrectnessRule):
    """1 where the response chooses the letter of the row's `answer`, else 0."""

    kind: Literal["multiple_choice"]
    """`multiple_choice`"""
    letters: str = Field(default="ABCDE", pattern=r"^[A-Z]{2,26}$")
    """The letters that may be chosen."""

    @property
    def needs_answer(self) -> bool:
        return True


class Match(StrEnum):
    """How much of a response a pattern has to match."""

    FULL = "full"
    SEARCH = "search"


class Pattern(CorrectnessRule):
    """1 where a regular expression matches the response, else 0."""

    kind: Literal["pattern"]
    """`pattern`"""
    pattern: str
    """A Python regular expression; its group `answer`, if any, must match the answer."""
    match: Match = Field(default=Match.SEARCH, strict=False)
    """`full`: the whole response has to match. `search`: a part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value

    @property
    def needs_answer(self) -> bool:
        return "answer" in re.compile(self.pattern).groupindex


class Format(CorrectnessRule):
    """1 where the response consists of the given tags, each once and in this order, else 0."""

    kind: Literal["format"]
    """`format`"""
    tags: list[str] = Field(default=["think", "answer"], min_length=1)
    """Names of the tags: [think, answer] is `<think>...</think><answer>...</answer>`."""


class JsonSchema(CorrectnessRule):
    """1 where the response is JSON that fits a schema, else 0."""

    kind: Literal["json_schema"]
    """`json_schema`"""
    definition: dict[str, Any] | None = None
    """The JSON schema itself; null: it is in `file`."""
    file: str | None = None
    """A file in `score.folder` that holds the schema."""

    @model_validator(mode="after")
    def _one_schema(self) -> "JsonSchema":
        if (self.definition is None) == (self.file is None):
            raise ValueError("a json_schema has either a `definition` or a `file`: give one")
        return self


class Instruction(Section):
    """One thing that every response has to do."""

    id: str
    """Its name, such as `punctuation:no_comma`; docs/rewards.md lists them."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, such as {num_words: 50, relation: at least}."""


class Counted(StrEnum):
    """What following some of several instructions is worth."""

    ALL = "all"
    SHARE = "share"


class Unsupported(StrEnum):
    """What to do at an instruction that there is no check for."""

    ERROR = "error"
    SKIP = "skip"


class Instructions(CorrectnessRule):
    """Whether the response follows instructions that a program can check (IFEval)."""

    kind: Literal["instructions"]
    """`instructions`"""
    instructions: list[Instruction] = Field(default_factory=list)
    """The same for every row; empty: each row's `instruction_id_list` and `kwargs`."""
    counted: Counted = Field(default=Counted.ALL, strict=False)
    """`all`: 1 if all are followed, else 0. `share`: the share that is followed."""
    unsupported: Unsupported = Field(default=Unsupported.ERROR, strict=False)
    """An instruction without a check is an `error`, or left out of the count (`skip`)."""


class LengthUnit(StrEnum):
    """What a length counts."""

    TOKENS = "tokens"
    WORDS = "words"
    CHARACTERS = "characters"


class LengthShape(StrEnum):
    """How the reward falls with the distance from the target."""

    LINEAR = "linear"
    COSINE = "cosine"


class LengthSide(StrEnum):
    """On which side of the target it falls."""

    BOTH = "both"
    LONGER = "longer"
    SHORTER = "shorter"


class Length(Rule):
    """1 at a target length, falling to 0 at a distance of `width`."""

    kind: Literal["length"]
    """`length`"""
    target: int = Field(ge=0)
    """The length to aim for."""
    width: int | None = Field(default=None, ge=1)
    """The distance from the target at which the reward is 0; null: the target itself."""
    unit: LengthUnit = Field(default=LengthUnit.TOKENS, strict=False)
    """What is counted."""
    shape: LengthShape = Field(default=LengthShape.LINEAR, strict=False)
    """`linear`: a straight line. `cosine`: flat at both ends."""
    side: LengthSide = Field(default=LengthSide.BOTH, strict=False)
    """Which responses lose reward: `both` sides of the target, `longer` or `shorter` ones."""

    @model_validator(mode="after")
    def _has_a_width(self) -> "Length":
        if not self.width and not self.target:
            raise ValueError("a target of 0 needs a width: from where on is the reward 0?")
        return self


class Repetition(Rule):
    """Minus the share of repeated word sequences; 0 for none."""

    kind: Literal["repetition"]
    """`repetition`"""
    ngram: int = Field(default=3, ge=1)
    """Words in a sequence."""


AnyRule = (
    Maths | MultipleChoice | Pattern | Format | JsonSchema | Instructions | Length | Repetition
)
