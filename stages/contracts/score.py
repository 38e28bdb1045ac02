"""score: rewards for the rollouts, and the reference policy's log-probs of them."""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.precision import Precision
from stages.contracts.rewards import AnySource
from stages.contracts.rl import TurnCredit


class ScoreParams(Section):
    """Turning responses into rewards."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the sum of rewards: `rl.reward`, `verifier`, `rewards`; empty: `rl.reward`."""
    folder: str = "rewards"
    """Folder of the functions, schemas and templates that `rewards` names."""
    reference: bool = True
    """Whether to compute the SFT policy's log-probs; without them there is no KL."""
    clip: float | None = Field(default=None, gt=0)
    """Rewards are clipped to plus or minus this; null: no clipping."""
    whiten: bool = False
    """Whether rewards are whitened: mean 0 and standard deviation 1 over the rollouts."""
    missing_eos_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a truncated response, subtracted from its reward."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty grows over the last so many tokens; 0: none."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Penalty of a response that fills the whole buffer, subtracted from its reward."""


class ScoreConfig(StageConfig):
    precision: Precision = Field(strict=False)
    score: ScoreParams
    rewards: dict[str, AnySource]
    reward: str = Field(alias="rl.reward")
    turn_credit: TurnCredit = Field(alias="rl.turn_credit", strict=False)
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
    reads=True,
    over=Over.ITERATIONS,
)
