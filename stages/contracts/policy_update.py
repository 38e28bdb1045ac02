"""policy_update: one iteration of learning from scored rollouts, by PPO or GRPO."""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.rl import Algorithm, Reward


class PolicyUpdateParams(Section):
    """Learning from scored rollouts. Critic and GAE fields are PPO's; GRPO leaves them aside."""

    learning_rate: float = Field(default=2.0e-4, gt=0)
    """Learning rate of the policy, constant after the warm-up of the first iteration."""
    critic_learning_rate: float = Field(default=1.0e-3, gt=0)
    """Learning rate of the critic (PPO)."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the rollouts."""
    critic_warmup_epochs: int = Field(default=2, ge=0)
    """Passes that fit the critic to the rollouts before the policy learns from it (PPO)."""
    batch_size: int = Field(default=128, ge=1)
    """Responses in one optimizer step, over all ranks."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio counts no lower than 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio counts no higher than 1 + clip_high."""
    value_clip: float = Field(default=0.5, gt=0)
    """Values move at most this far from the old ones in one iteration's loss (PPO)."""
    kl_coef: float = Field(default=0.3, ge=0)
    """Weight of the KL penalty against the SFT policy in the reward of each token (PPO)."""
    kl_loss_coef: float = Field(default=0.05, ge=0)
    """Weight of the KL term against the SFT policy in the loss (GRPO)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards, token by token (PPO)."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE's trade of bias against variance (PPO)."""
    normalise_by_std: bool = True
    """Whether a group's advantages are divided by its standard deviation (GRPO)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    max_logprob_gap: float = Field(default=0.05, gt=0)
    """Most mean difference of sampler and trainer log-probs; past it, the update stops."""
    max_kl: float = Field(default=2.0, gt=0)
    """Most KL from the SFT policy (nats per response token, k3); past it, the update stops."""


class PolicyUpdateConfig(StageConfig):
    """What policy_update sees of params.yaml."""

    seed: int
    policy_update: PolicyUpdateParams
    algorithm: Algorithm = Field(alias="rl.algorithm", strict=False)
    reward: Reward = Field(alias="rl.reward", strict=False)
    temperature: float = Field(alias="rollout.temperature")


POLICY_UPDATE = Stage(
    name="policy_update",
    module="stages.policy_update",
    config=PolicyUpdateConfig,
    inputs={
        "rollouts": "artifacts/rollouts/{key}.parquet",
        "scores": "artifacts/scores/{key}.parquet",
        "policy": "artifacts/policies/{policy}/model",
        "state": "artifacts/policies/{policy}/state",
        "reward": "artifacts/rewards/{reward}",
    },
    outs={
        "model": "artifacts/policies/{key}/model",
        "state": "artifacts/policies/{key}/state",
    },
    metrics="metrics/iterations/{key}/policy_update.json",
    processes=Processes.TOGETHER,
    over=Over.ITERATIONS,
)
