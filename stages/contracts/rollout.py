"""rollout: responses sampled from the current policy, with the log-probs they were sampled at."""

from enum import StrEnum

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.episodes import EpisodeParams
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


class Tools(StrEnum):
    """What becomes of what environments answer."""

    LIVE = "live"
    """They are asked, and nothing is recorded."""
    RECORD = "record"
    """What `rollout.tool_record` lacks is asked, and all answers are recorded."""
    REPLAY = "replay"
    """Nobody is asked: every answer is in `rollout.tool_record`."""


class RolloutParams(Section):
    """Sampling responses to train on."""

    source: PromptSource = Field(default=PromptSource.PROMPTS, strict=False)
    """`prompts`, or the prompts of the `demonstrations` (SPIN compares with these)."""
    prompts: int = Field(default=256, ge=1)
    """Prompts drawn for one iteration."""
    reserve: int = Field(default=0, ge=0)
    """Dynamic sampling: extra prompts that replace those whose responses all score the same."""
    samples: int = Field(default=4, ge=1)
    """Responses sampled for each prompt: the size of a group."""
    greedy_baseline: bool = False
    """Whether each prompt also gets a greedy response: the baseline of ReMax."""
    max_new_tokens: int = Field(default=28, ge=1)
    """Largest number of tokens of a response; a longer one is truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; training divides logits by it, too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the likeliest tokens up to this total probability; 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Top-k sampling: number of the likeliest tokens; 0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Min-p sampling: smallest probability relative to the likeliest token; 0: all tokens."""
    engine: Engine = Field(default=Engine.AUTO, strict=False)
    """`torch`, `vllm`, or `auto`: vllm on a GPU for over 3 billion weights, where installed."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences decoded together. Rounding depends on it, so changing it reruns the stage."""
    environment: str | None = None
    """Environment of the rollouts: `calculator`, `guess`, `python` or module:Class; null: none."""
    environments: str = "environments"
    """Folder with the modules of your own environments."""
    tools: Tools = Field(default=Tools.RECORD, strict=False)
    """Answers of environments: `live`, `record`, or `replay` from `tool_record` alone."""
    tool_record: str = "tool_answers"
    """Folder with answers of an earlier run, which `record` and `replay` read."""
    max_turns: int = Field(default=8, ge=1)
    """Largest number of turns of an episode; they share `max_new_tokens`."""
    max_observation_tokens: int = Field(default=64, ge=1)
    """Largest number of tokens of one observation, chat template included."""

    @property
    def cuts_support(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RolloutConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    rollout: RolloutParams
    episodes: EpisodeParams


ROLLOUT = Stage(
    name="rollout",
    module="stages.rollout",
    config=RolloutConfig,
    inputs={
        "policy": "artifacts/policies/{policy}/model",
        "prompts": "artifacts/data/{prompts}.parquet",
        "environments": "{environments}",
        "tool_record": "{tool_record}",
    },
    outs={
        "rollouts": "artifacts/rollouts/{key}.parquet",
        "tool_answers": "artifacts/tool_answers/{key}.parquet",
    },
    metrics="metrics/iterations/{key}/rollout.json",
    processes=Processes.SHARDS,
    over=Over.ITERATIONS,
)
