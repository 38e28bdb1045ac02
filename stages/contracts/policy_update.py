"""policy_update: one iteration of learning from scored rollouts, by the algorithm of `rl`."""

from enum import StrEnum

from pydantic import Field, model_validator

from stages.contracts.base import Over, Processes, Section, Stage, StageConfig
from stages.contracts.lora import LoraParams
from stages.contracts.objectives import (
    Aggregation,
    KlEstimator,
    KlPlace,
    Mismatch,
    PolicyObjective,
    PreferenceLoss,
)
from stages.contracts.optimizer import Schedule
from stages.contracts.precision import Precision
from stages.contracts.preference import check_loss_settings
from stages.contracts.rl import Algorithm


class Critic(StrEnum):
    """What the first iteration's critic starts from."""

    AUTO = "auto"
    """The reward model where the reward is one, else the policy; none where none is needed."""
    REWARD_MODEL = "reward_model"
    POLICY = "policy"
    """The policy's backbone with a new head, whose weights are zero."""
    NONE = "none"


class Chosen(StrEnum):
    """Where iterated DPO takes its chosen responses from."""

    BEST = "best"
    """The best response to a prompt; the worst is rejected."""
    DEMONSTRATIONS = "demonstrations"
    """The prompt's demonstration; the policy's own response is rejected (SPIN)."""


class DpoReference(StrEnum):
    """The policy that iterated DPO measures its distance from."""

    PREVIOUS = "previous"
    SFT = "sft"


class PolicyUpdateParams(Section):
    """Learning from scored rollouts. A field that belongs to some algorithms says to which."""

    learning_rate: float = Field(default=2.0e-4, gt=0)
    """Learning rate of the policy."""
    critic_learning_rate: float = Field(default=1.0e-3, gt=0)
    """Learning rate of the critic (PPO)."""
    warmup_steps: int = Field(default=5, ge=0)
    """Warm-up of the learning rates, in optimizer steps counted over all iterations."""
    schedule: Schedule = Field(default=Schedule.CONSTANT, strict=False)
    """`constant`, or `linear` or `cosine` decay over `decay_steps`."""
    decay_steps: int = Field(default=0, ge=0)
    """End of the decay, in optimizer steps counted over all iterations."""
    min_learning_rate: float = Field(default=0.0, ge=0, le=1)
    """Learning rate after the decay, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    decay_norms_and_biases: bool = False
    """Whether norms and biases decay like other weights; transformers and TRL spare them."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta1: decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's beta2: decay of the mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping: largest norm of all gradients together."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the rollouts."""
    batch_size: int = Field(default=128, ge=1)
    """Responses (for DPO: pairs) in one optimizer step, over all ranks."""

    objective: PolicyObjective = Field(default=PolicyObjective.CLIP, strict=False)
    """`clip` (PPO's surrogate), `gspo`, `cispo` or `gradient` (policy gradient without a ratio)."""
    clip_low: float = Field(default=0.2, gt=0)
    """Lower clip of the probability ratio, 1 - clip_low; for cispo, 1 or more is no bound."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip of the probability ratio, 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Dual-clip PPO: upper bound of the ratio where the advantage is negative; null: off."""
    aggregation: Aggregation = Field(default=Aggregation.TOKEN_MEAN, strict=False)
    """`token_mean`, `sequence_mean_token_mean` or `sequence_mean_token_sum`."""
    length_scale: float | None = Field(default=None, gt=0)
    """Divisor of `sequence_mean_token_sum`; null: rollout.max_new_tokens."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    overlong_filter: bool = False
    """Whether truncated responses are left out of the loss."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (PPO, REINFORCE, REINFORCE++)."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda: lower has more bias and less variance (PPO)."""
    normalise_by_std: bool = True
    """Whether a group's advantages are divided by its standard deviation (GRPO)."""
    leave_one_out: bool = False
    """Whether a group's mean and deviation leave out the response itself (GRPO)."""
    whiten_advantages: bool = True
    """Whether advantages are whitened: mean 0, standard deviation 1 (PPO, REINFORCE)."""

    critic: Critic = Field(default=Critic.AUTO, strict=False)
    """What the first critic starts from: `auto`, `reward_model` or `policy`; `none`: no critic."""
    critic_warmup_epochs: int = Field(default=2, ge=0)
    """Passes that fit the critic to the rollouts before the policy is trained (PPO)."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """Value clipping: largest change from the old value in the loss; null: off (PPO)."""

    kl_in: KlPlace = Field(default=KlPlace.REWARD, strict=False)
    """Whether the KL penalty against the SFT policy is part of the `reward` or of the `loss`."""
    kl_estimator: KlEstimator = Field(default=KlEstimator.K1, strict=False)
    """`k1`, `k2`, `k3`, or `k3_unbiased`, whose gradient is that of the KL."""
    kl_coef: float = Field(default=0.3, ge=0)
    """KL penalty coefficient of policy gradients; 0: no penalty."""
    kl_target: float | None = Field(default=None, gt=0)
    """Target KL of an adaptive kl_coef, in nats per response; null: kl_coef is fixed."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Horizon of an adaptive kl_coef, in responses: the larger, the slower it adapts."""
    max_kl: float = Field(default=2.0, gt=0)
    """Largest KL to the SFT policy, in nats per token; above it, the update stops with an error."""

    mismatch: Mismatch = Field(default=Mismatch.NONE, strict=False)
    """Importance-sampling correction for a sampler whose log-probs differ from the trainer's."""
    mismatch_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight of a token or response."""
    mismatch_floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest importance weight that a masking correction keeps."""
    max_logprob_gap: float = Field(default=0.05, gt=0)
    """Largest mean gap between sampler and trainer log-probs; above it, the update stops."""
    min_effective_samples: float = Field(default=0.5, ge=0, le=1)
    """Smallest effective sample size, as a share of the samples; below it, the update stops."""

    chosen: Chosen = Field(default=Chosen.BEST, strict=False)
    """`best` against worst of each group, or `demonstrations` against own responses (DPO)."""
    dpo_reference: DpoReference = Field(default=DpoReference.PREVIOUS, strict=False)
    """The `previous` policy, or the `sft` policy (DPO)."""
    dpo_loss: PreferenceLoss = Field(default=PreferenceLoss.SIGMOID, strict=False)
    """Any loss of preference pairs, as `preference.loss` has them (DPO)."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """KL penalty coefficient: the beta of DPO (DPO)."""
    dpo_label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Label smoothing: assumed share of pairs with swapped labels (DPO)."""
    dpo_margin: float = Field(default=0.0, ge=0)
    """SimPO's target margin (DPO)."""
    dpo_nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen responses' negative log-likelihood (DPO)."""
    keep_best: int = Field(default=1, ge=1)
    """Responses of each group to learn from (best-of-n)."""
    distill_top_k: int = Field(default=0, ge=0)
    """Number of the teacher's likeliest tokens to match; 0: the sampled ones (distillation)."""

    @model_validator(mode="after")
    def _settings_belong_together(self) -> "PolicyUpdateParams":
        if self.schedule is not Schedule.CONSTANT and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule} needs decay_steps above warmup_steps "
                f"{self.warmup_steps}: it is {self.decay_steps}"
            )
        if self.dual_clip is not None and self.objective is not PolicyObjective.CLIP:
            raise ValueError(
                f"dual_clip belongs to objective clip; {self.objective} has nothing for it to "
                "bound: set dual_clip to null"
            )
        if self.objective is not PolicyObjective.CISPO and self.clip_low >= 1:
            raise ValueError(f"clip_low {self.clip_low} is no bound for a ratio: set it below 1")
        if self.kl_coef and self.kl_in is KlPlace.LOSS and self.kl_estimator is KlEstimator.K1:
            raise ValueError(
                "kl_estimator k1 in the loss pulls nowhere: its gradient does not depend on the "
                "reference, and is zero on average. Use k2, k3 or k3_unbiased, or kl_in: reward"
            )
        if self.kl_in is KlPlace.REWARD and self.kl_estimator is KlEstimator.K3_UNBIASED:
            raise ValueError(
                "kl_estimator k3_unbiased is about gradients, and a reward has none: use k1, k2 "
                "or k3, or kl_in: loss"
            )
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target needs a kl_coef above 0 to start from")
        check_loss_settings(
            self.dpo_loss, self.dpo_label_smoothing, self.dpo_margin, self.dpo_nll_coef
        )
        return self


class PolicyUpdateConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    policy_update: PolicyUpdateParams
    algorithm: Algorithm = Field(alias="rl.algorithm", strict=False)
    reward: str = Field(alias="rl.reward")
    turn_discount: float = Field(alias="rl.turn_discount")
    prompts: int = Field(alias="rollout.prompts")
    reserve: int = Field(alias="rollout.reserve")
    temperature: float = Field(alias="rollout.temperature")
    max_new_tokens: int = Field(alias="rollout.max_new_tokens")
    lora: LoraParams


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
        "demonstrations": "artifacts/data/demonstrations.parquet",
        "teacher": "{teacher}",
    },
    outs={
        "model": "artifacts/policies/{key}/model",
        "state": "artifacts/policies/{key}/state",
        "experience": "artifacts/policies/{key}/experience.parquet",
    },
    metrics="metrics/iterations/{key}/policy_update.json",
    processes=Processes.TOGETHER,
    over=Over.ITERATIONS,
)
