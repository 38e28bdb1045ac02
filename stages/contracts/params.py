"""The whole of params.yaml, and what its values must agree on."""

from pydantic import Field, model_validator

from stages.contracts.base import Section
from stages.contracts.evaluate import EvaluateParams
from stages.contracts.model import ModelParams
from stages.contracts.policy_update import PolicyUpdateParams
from stages.contracts.prepare import PrepareParams
from stages.contracts.reward_model import RewardModelParams
from stages.contracts.rl import Algorithm, RlParams
from stages.contracts.rollout import RolloutParams
from stages.contracts.score import ScoreParams
from stages.contracts.sft import SftParams


class ReportParams(Section):
    """The page at the end."""

    samples: int = Field(default=12, ge=1)
    """Held-out prompts shown with their responses before and after."""


class Params(Section):
    """Everything that bears identity. A change here reruns exactly the stages that read it."""

    seed: int = Field(default=17, ge=0)
    """All randomness is drawn from this number."""
    model: ModelParams = ModelParams()
    """The base model that SFT and the reward model start from."""
    prepare: PrepareParams = PrepareParams()
    """The data."""
    sft: SftParams = SftParams()
    """Supervised fine-tuning."""
    reward_model: RewardModelParams = RewardModelParams()
    """Reward-model training."""
    rl: RlParams = RlParams()
    """Algorithm, reward, and the family tree of policies."""
    rollout: RolloutParams = RolloutParams()
    """Sampling responses to train on."""
    score: ScoreParams = ScoreParams()
    """Turning responses into rewards."""
    policy_update: PolicyUpdateParams = PolicyUpdateParams()
    """Learning from scored rollouts."""
    evaluate: EvaluateParams = EvaluateParams()
    """Measuring policies on held-out prompts."""
    report: ReportParams = ReportParams()
    """The page at the end."""

    @model_validator(mode="after")
    def _values_agree(self) -> "Params":
        if self.rl.algorithm is Algorithm.GRPO and self.rollout.samples < 2:
            raise ValueError(
                "rl.algorithm is grpo, which compares the responses to one prompt, but "
                f"rollout.samples is {self.rollout.samples}: set it to 2 or more"
            )
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_new_tokens {self.rollout.max_new_tokens} leaves no room for a prompt "
                f"in model.max_length {self.model.max_length}"
            )
        drawn, available = self.rollout.prompts, self.prepare.prompts
        if self.prepare.source == "arithmetic" and drawn > available:
            raise ValueError(
                f"rollout.prompts {drawn} is more than the {available} of prepare.prompts"
            )
        return self
