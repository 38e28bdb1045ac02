"""rewards: the sources of rewards that params.yaml names, each of one kind.

`score.weights` and `rl.reward` speak of a source by its name. What a kind needs is written in its
own class, and nothing else is allowed in it. docs/rewards.md has an example of each.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from stages.contracts.base import Over, Section, Stage, StageConfig
from stages.contracts.family import refuse_odd_names
from stages.contracts.precision import Precision
from stages.contracts.reward_rules import AnyRule, Counted
from stages.contracts.rl import Reward

UNISOLATED = "run hostile code on this machine without isolation"
TEMPLATE_NAMES = ("prompt", "response", "answer")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


class Batched(Section):
    """What is asked about several responses at once."""

    batch_size: int = Field(default=64, ge=1)
    """Responses in one call."""
    timeout: float = Field(default=30.0, gt=0)
    """Time limit of one call, in seconds."""
    concurrency: int = Field(default=1, ge=1)
    """Calls in parallel."""


class Function(Batched):
    """A Python function of yours, in a process of its own."""

    kind: Literal["function"]
    """`function`"""
    function: str
    """`module:function`; the module is a file in `score.folder`."""

    @field_validator("function")
    @classmethod
    def _is_a_function(cls, value: str) -> str:
        if not _FUNCTION.fullmatch(value):
            raise ValueError(f"{value!r} does not name a function: write module:function")
        return value


class Form(StrEnum):
    """How a reward model reads a prompt and a response."""

    CHAT = "chat"
    PAIR = "pair"


class Read(StrEnum):
    """What of a classifier's answer the reward is."""

    LOGIT = "logit"
    PROBABILITY = "probability"


class Model(Section):
    """A finished reward model with a tokenizer of its own: a sequence classifier."""

    kind: Literal["model"]
    """`model`"""
    folder: str
    """Its Hugging Face folder, in `score.folder`."""
    label: int | str | None = None
    """Which label's number is the reward, by index or name; null: its only one."""
    read: Read = Field(default=Read.LOGIT, strict=False)
    """The `logit` as it is, or the `probability` of the label."""
    form: Form = Field(default=Form.CHAT, strict=False)
    """`chat`: one text by its chat template. `pair`: prompt and response as a pair of texts."""
    chat_template: str | None = None
    """`plain`, `chatml`, or a .jinja file in its folder; null: its own (chat)."""
    precision: Precision = Field(default=Precision.FLOAT32, strict=False)
    """Type that it computes in."""
    batch_size: int = Field(default=16, ge=1)
    """Largest number of texts in one forward pass."""


class Remote(Section):
    """What is asked over HTTP."""

    url: str
    """The endpoint: http:// or https://, without a user part."""
    timeout: float = Field(default=60.0, gt=0)
    """Time limit of one request, in seconds."""
    retries: int = Field(default=5, ge=0)
    """Retries of a request after 429, 5xx or a failed connection."""
    concurrency: int = Field(default=8, ge=1)
    """Requests in parallel."""
    token_variable: str | None = None
    """Environment variable whose value is sent as bearer token; null: none is sent."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{value!r} is no address that begins with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError(
                "a password in an address would be in git: put the token into an environment "
                "variable, and the variable's name into `token_variable`"
            )
        return value

    @field_validator("token_variable")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not _VARIABLE.fullmatch(value):
            raise ValueError(
                "this is not the name of an environment variable; the token itself must not be in "
                "params.yaml"
            )
        return value


class Http(Remote):
    """A reward model behind an HTTP endpoint."""

    kind: Literal["http"]
    """`http`"""
    batch_size: int = Field(default=32, ge=1)
    """Responses in one request."""
    columns: list[str] = Field(default=["prompts", "responses", "answers"], min_length=1)
    """Columns that are sent, named as for functions."""


class Judge(Remote):
    """A language model that is asked for a number, behind an OpenAI-compatible endpoint."""

    kind: Literal["judge"]
    """`judge`"""
    model: str
    """The model's name at the endpoint."""
    template: str | None = None
    """The question, with {prompt}, {response}, {answer} or any column; null: in `file`."""
    file: str | None = None
    """A file in `score.folder` that holds the template."""
    system: str | None = None
    """The system message; null: none."""
    low: float = 0.0
    """Lowest valid number."""
    high: float = 10.0
    """Highest valid number."""
    field: str | None = None
    """The JSON field that holds the number; null: the last number of the text."""
    on_unparsable: float | None = None
    """Reward if the answer has no such number; null: the stage fails and shows the answer."""
    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens of the answer."""

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> "Judge":
        if (self.template is None) == (self.file is None):
            raise ValueError("a judge has either a `template` or a `file`: give one")
        if self.template is not None and "{response}" not in self.template:
            raise ValueError("the template has no {response}: what should the judge judge?")
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class Paid(Section):
    """What `rollout.environment` paid for the episode."""

    kind: Literal["environment"]
    """`environment`"""


class Code(Section):
    """The response is a Python program: whether it passes its row's tests, in a sandbox."""

    kind: Literal["code"]
    """`code`"""
    counted: Counted = Field(default=Counted.ALL, strict=False)
    """`all`: 1 if all tests pass, else 0. `share`: the share that passes."""
    must_end: bool = True
    """Whether a truncated response counts as wrong."""
    cpu_s: float = Field(default=10.0, gt=0)
    """CPU time limit of a program, in seconds: the limit to hit first."""
    wall_s: float = Field(default=60.0, gt=0)
    """Wall-clock limit, in seconds; generous, since a loaded machine is slower."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory limit of all its processes together."""
    processes: int = Field(default=16, ge=1)
    """Limit of processes and threads at a time."""
    file_mb: int = Field(default=16, ge=1)
    """Limit of the size of all files it writes."""
    output_kb: int = Field(default=256, ge=1)
    """Limit of its output, and again of its standard error."""
    concurrency: int = Field(default=4, ge=1)
    """Programs in parallel."""
    allow_unisolated: str | None = None
    """`run hostile code on this machine without isolation`: without a sandbox; null: an error."""

    @field_validator("allow_unisolated")
    @classmethod
    def _is_meant(cls, value: str | None) -> str | None:
        if value not in (None, UNISOLATED):
            raise ValueError(f"say it in so many words, {UNISOLATED!r}, or leave it null")
        return value


AnySource = Annotated[
    AnyRule | Function | Model | Http | Judge | Paid | Code, Field(discriminator="kind")
]


def refuse_source_names(value: Any) -> Any:
    """A mapping whose keys can name sources; ValueError says which cannot."""
    for name in value if isinstance(value, dict) else ():
        if name in [*Reward]:
            raise ValueError(f"there is a source called {name!r} already: choose another name")
    return refuse_odd_names(value, "right, short, judge, ...")


class RewardSourceConfig(StageConfig):
    source: AnySource = Field(alias="rewards.{key}")


REWARD_SOURCE = Stage(
    name="reward_source",
    module="stages.reward_source",
    config=RewardSourceConfig,
    inputs={"functions": "{functions}"},
    outs={"source": "artifacts/rewards/{key}"},
    metrics="metrics/rewards/{key}.json",
    over=Over.REWARDS,
)
