"""rollout: responses sampled from the current policy, with the log-probs they were sampled at."""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig


class RolloutParams(Section):
    """Sampling responses to train on."""

    prompts: int = Field(default=256, ge=1)
    """Prompts drawn for one iteration."""
    samples: int = Field(default=4, ge=1)
    """Responses sampled for each prompt; for GRPO, the size of a group."""
    max_new_tokens: int = Field(default=28, ge=1)
    """Most tokens in a response; one that has not ended by then is truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this, in sampling and in training alike."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences decoded together; floating-point rounding depends on it, so it bears identity."""


class RolloutConfig(StageConfig):
    """What rollout sees of params.yaml."""

    seed: int
    rollout: RolloutParams


ROLLOUT = Stage(
    name="rollout",
    module="stages.rollout",
    config=RolloutConfig,
    inputs={
        "policy": "artifacts/policies/{policy}/model",
        "prompts": "artifacts/data/prompts.parquet",
    },
    outs={"rollouts": "artifacts/rollouts/{key}.parquet"},
    metrics="metrics/iterations/{key}/rollout.json",
    processes=Processes.SHARDS,
    over=Over.ITERATIONS,
)
