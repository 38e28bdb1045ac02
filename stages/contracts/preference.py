"""Learning from preferences directly: reference_logprobs, preference and its evaluation.

`rl.preferences` names the policies that are made so. It is empty by default, and the graph then has
no such stage.
"""

from pydantic import Field, model_validator

from stages.contracts.base import Over, Processes, Stage, StageConfig
from stages.contracts.lora import LoraParams
from stages.contracts.objectives import PreferenceLoss
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.precision import Precision

SMOOTHED = (PreferenceLoss.SIGMOID, PreferenceLoss.ROBUST)


class PreferenceParams(OptimizerParams):
    """Learning from preferences directly: DPO and its kin, KTO, ORPO, SimPO."""

    learning_rate: float = Field(default=1.0e-4, gt=0)
    epochs: int = Field(default=1, ge=1)
    """Passes over the preferences."""
    batch_size: int = Field(default=32, ge=1)
    """Pairs (for KTO: single responses) in one optimizer step, over all ranks."""
    loss: PreferenceLoss = Field(default=PreferenceLoss.SIGMOID, strict=False)
    """`sigmoid` (DPO), `hinge`, `ipo`, `robust`, `apo_zero`, `apo_down`, `simpo`, `orpo`, `kto`."""
    beta: float = Field(default=0.1, gt=0)
    """KL penalty coefficient beta; for ORPO, the weight of the odds-ratio term."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Label smoothing: assumed share of wrong labels: cDPO with `sigmoid`, or `robust`."""
    margin: float = Field(default=0.0, ge=0)
    """SimPO's target margin between the rewards of a pair."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the chosen responses' negative log-likelihood beside a paired loss."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable responses (KTO)."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable responses (KTO)."""
    desirable_above: float = 0.5
    """A response rated higher than this in the feedback is desirable (KTO)."""

    @model_validator(mode="after")
    def _settings_belong_to_the_loss(self) -> "PreferenceParams":
        check_loss_settings(self.loss, self.label_smoothing, self.margin, self.nll_coef)
        return self


def check_loss_settings(
    loss: PreferenceLoss, label_smoothing: float, margin: float, nll_coef: float
) -> None:
    """ValueError where a preference loss is given a term that it does not have."""
    if label_smoothing and loss not in SMOOTHED:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, but the loss is {loss}, which has no such "
            "term: set it to 0, or the loss to sigmoid or robust"
        )
    if margin and loss is not PreferenceLoss.SIMPO:
        raise ValueError(
            f"margin is {margin}, which only simpo has, but the loss is {loss}: set margin to 0"
        )
    if nll_coef and loss in (PreferenceLoss.ORPO, PreferenceLoss.KTO):
        why = "has it already" if loss is PreferenceLoss.ORPO else "has no chosen response"
        raise ValueError(f"nll_coef is {nll_coef}, but {loss} {why}: set it to 0")


class PreferenceConfig(StageConfig):
    seed: int
    precision: Precision = Field(strict=False)
    preference: PreferenceParams
    lora: LoraParams


class ReferenceLogprobsConfig(StageConfig):
    precision: Precision = Field(strict=False)
    loss: PreferenceLoss = Field(alias="preference.loss", strict=False)


REFERENCE_LOGPROBS = Stage(
    name="reference_logprobs",
    module="stages.reference_logprobs",
    config=ReferenceLogprobsConfig,
    inputs={
        "policy": "artifacts/policies/{policy}/model",
        "preferences": "artifacts/data/preferences.parquet",
        "feedback": "artifacts/data/feedback.parquet",
    },
    outs={"logprobs": "artifacts/reference_logprobs/{key}.parquet"},
    metrics="metrics/iterations/{key}/reference_logprobs.json",
    processes=Processes.SHARDS,
    reads=True,
    over=Over.PREFERENCES,
)

PREFERENCE = Stage(
    name="preference",
    module="stages.preference",
    config=PreferenceConfig,
    inputs={
        "policy": "artifacts/policies/{policy}/model",
        "preferences": "artifacts/data/preferences.parquet",
        "feedback": "artifacts/data/feedback.parquet",
        "reference": "artifacts/reference_logprobs/{key}.parquet",
    },
    outs={
        "model": "artifacts/policies/{key}/model",
        "state": "artifacts/policies/{key}/state",
    },
    metrics="metrics/iterations/{key}/preference.json",
    processes=Processes.TOGETHER,
    over=Over.PREFERENCES,
)
