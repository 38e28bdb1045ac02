"""rollout: responses sampled from the current policy, with the log-probs they were sampled at."""

from enum import StrEnum

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.precision import Precision


class PromptSource(StrEnum):
    """The data whose prompts are answered: the name of its file under artifacts/data."""

    PROMPTS = "prompts"
    DEMONSTRATIONS = "demonstrations"


class Engine(StrEnum):
    """What decodes."""

    AUTO = "auto"
    """torch on the CPU and for models of up to 3 billion weights; else vllm, where installed."""
    TORCH = "torch"
    VLLM = "vllm"


class RolloutParams(Section):
    """Sampling responses to train on."""

    source: PromptSource = Field(default=PromptSource.PROMPTS, strict=False)
    """`prompts`, or `demonstrations`: their prompts, so that both can be compared (SPIN)."""
    prompts: int = Field(default=256, ge=1)
    """Prompts drawn for one iteration."""
    reserve: int = Field(default=0, ge=0)
    """Prompts drawn to stand in for those whose responses all get the same reward."""
    samples: int = Field(default=4, ge=1)
    """Responses sampled for each prompt: the size of a group."""
    greedy_baseline: bool = False
    """Whether each prompt is answered greedily too, for ReMax to compare with."""
    max_new_tokens: int = Field(default=28, ge=1)
    """Most tokens in a response; one that has not ended by then is truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this, in sampling and in training alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that have this probability together are sampled; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Only so many of the likeliest tokens are sampled; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Only tokens at least this share as likely as the likeliest are sampled; 0: all."""
    engine: Engine = Field(default=Engine.AUTO, strict=False)
    """`torch`, `vllm`, or `auto`: vllm on a GPU for over 3 billion weights, where installed."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences decoded together; floating-point rounding depends on it, so it bears identity."""
    environment: str | None = None
    """What responses are played with, turn by turn: `calculator`, `guess`, module:Class; null."""
    environments: str = "environments"
    """Folder with the modules of your own environments."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of an episode; `max_new_tokens` is for all of them together."""
    max_observation_tokens: int = Field(default=64, ge=1)
    """Most tokens, chat template included, of what an environment answers to one turn."""
    environment_timeout: float = Field(default=60.0, gt=0)
    """Seconds that an environment may take to answer."""

    @property
    def cuts_support(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RolloutConfig(StageConfig):
    """What rollout sees of params.yaml."""

    seed: int
    precision: Precision = Field(strict=False)
    rollout: RolloutParams


ROLLOUT = Stage(
    name="rollout",
    module="stages.rollout",
    config=RolloutConfig,
    inputs={
        "policy": "artifacts/policies/{policy}/model",
        "prompts": "artifacts/data/{prompts}.parquet",
        "environments": "{environments}",
    },
    outs={"rollouts": "artifacts/rollouts/{key}.parquet"},
    metrics="metrics/iterations/{key}/rollout.json",
    processes=Processes.SHARDS,
    over=Over.ITERATIONS,
)
