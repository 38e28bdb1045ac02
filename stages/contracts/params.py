"""The whole of params.yaml, and what its values must agree on."""

from pydantic import Field, field_validator, model_validator

from stages.contracts.base import Section
from stages.contracts.episodes import EpisodeParams
from stages.contracts.evaluate import EvaluateParams
from stages.contracts.lora import LoraParams
from stages.contracts.model import ModelParams
from stages.contracts.online import OnlineParams
from stages.contracts.policy_update import PolicyUpdateParams
from stages.contracts.precision import Precision
from stages.contracts.preference import PreferenceParams
from stages.contracts.prepare import PrepareParams
from stages.contracts.refusals import REFUSALS
from stages.contracts.reward_model import RewardModelParams
from stages.contracts.rewards import AnySource, refuse_source_names
from stages.contracts.rl import RlParams
from stages.contracts.rollout import RolloutParams
from stages.contracts.score import ScoreParams
from stages.contracts.sft import SftParams
from stages.contracts.warn import WarnParams


class ReportParams(Section):
    """The report page."""

    samples: int = Field(default=12, ge=1)
    """Held-out prompts shown with their responses before and after."""


class Params(Section):
    """Everything that bears identity. A change here reruns exactly the stages that read it."""

    seed: int = Field(default=17, ge=0)
    """Random seed of the whole pipeline."""
    precision: Precision = Field(default=Precision.FLOAT32, strict=False)
    """Type that models compute in; trained weights stay float32 either way."""
    model: ModelParams = ModelParams()
    """The base model that SFT and the reward model start from."""
    prepare: PrepareParams = PrepareParams()
    """The data."""
    sft: SftParams = SftParams()
    """Supervised fine-tuning."""
    reward_model: RewardModelParams = RewardModelParams()
    """Reward-model training."""
    lora: LoraParams = LoraParams()
    """Low-rank adapters, for every stage that trains."""
    preference: PreferenceParams = PreferenceParams()
    """Learning from preferences directly."""
    rl: RlParams = RlParams()
    """Algorithm, reward, and the family tree of policies."""
    rollout: RolloutParams = RolloutParams()
    """Sampling responses to train on."""
    episodes: EpisodeParams = EpisodeParams()
    """Asking the environment of `rollout.environment`, and what happens where it fails."""
    rewards: dict[str, AnySource] = Field(default_factory=dict)
    """Sources of rewards by name, each of a kind: docs/rewards.md."""
    score: ScoreParams = ScoreParams()
    """Turning responses into rewards."""
    policy_update: PolicyUpdateParams = PolicyUpdateParams()
    """Learning from scored rollouts."""
    online: OnlineParams = OnlineParams()
    """Fused steps, for the policies in rl.online."""
    evaluate: EvaluateParams = EvaluateParams()
    """Measuring policies on held-out prompts."""
    report: ReportParams = ReportParams()
    """The report page."""
    warn: WarnParams = WarnParams()
    """Thresholds of the warnings; docs/warnings.md explains each."""

    _sources_have_names = field_validator("rewards", mode="before")(refuse_source_names)

    @model_validator(mode="after")
    def _values_agree(self) -> "Params":
        for refusal in REFUSALS:
            for reason in refusal(self):
                raise ValueError(reason)
        return self
