"""score: rewards for the rollouts, and the reference policy's log-probs of them."""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.precision import Precision
from stages.contracts.rewards import AnySource


class ScoreParams(Section):
    """Turning responses into rewards."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each source: `rl.reward`, `verifier`, names in `rewards`; empty: `rl.reward`."""
    folder: str = "rewards"
    """Where the functions, schemas and templates are that `rewards` names."""
    reference: bool = True
    """Whether the SFT policy's log-probs are computed; without them, there is no KL to speak of."""
    clip: float | None = Field(default=None, gt=0)
    """Rewards count no further than this from zero; null: as they are."""
    whiten: bool = False
    """Whether rewards are brought to mean 0 and standard deviation 1 over the rollouts."""
    missing_eos_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward of a response that was cut before it ended."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The last so many tokens before rollout.max_new_tokens are penalised, more and more (DAPO)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Taken off the reward of a response that fills the whole buffer."""


class ScoreConfig(StageConfig):
    """What score sees of params.yaml."""

    precision: Precision = Field(strict=False)
    score: ScoreParams
    rewards: dict[str, AnySource]
    reward: str = Field(alias="rl.reward")
    temperature: float = Field(alias="rollout.temperature")
    max_new_tokens: int = Field(alias="rollout.max_new_tokens")


SCORE = Stage(
    name="score",
    module="stages.score",
    config=ScoreConfig,
    inputs={
        "rollouts": "artifacts/rollouts/{key}.parquet",
        "reward": "artifacts/rewards/{reward}",
        "verifier": "artifacts/rewards/verifier",
        "functions": "{functions}",
        "reference": "artifacts/policies/sft/model",
    },
    outs={"scores": "artifacts/scores/{key}.parquet"},
    metrics="metrics/iterations/{key}/score.json",
    processes=Processes.SHARDS,
    over=Over.ITERATIONS,
)
