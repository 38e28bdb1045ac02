"""The names that algorithms go by in params.yaml. No torch in here."""

from enum import StrEnum


class Aggregation(StrEnum):
    """How token losses are aggregated."""

    TOKEN_MEAN = "token_mean"
    """Over all tokens of the optimizer step: long responses count in full (DAPO)."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    """Within each response, then over responses (GRPO as published)."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    """Summed within each response over a constant, then averaged over responses (Dr. GRPO)."""


class PolicyObjective(StrEnum):
    """The objective of a policy update."""

    CLIP = "clip"
    """PPO's clipped surrogate, token by token."""
    GSPO = "gspo"
    """The clipped surrogate of one length-normalised ratio per response."""
    CISPO = "cispo"
    """The policy gradient of every token, weighted by its clipped ratio."""
    GRADIENT = "gradient"
    """The plain policy gradient: no ratio, no clipping."""


class KlPlace(StrEnum):
    """Where the KL penalty goes."""

    REWARD = "reward"
    LOSS = "loss"


class KlEstimator(StrEnum):
    """How KL(policy || reference) is estimated from a sampled token."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"


class Mismatch(StrEnum):
    """Importance-sampling corrections for a sampler whose log-probs differ from the trainer's."""

    NONE = "none"
    TOKEN_TRUNCATE = "token_truncate"
    """Each token's loss is weighted by trainer / sampler probability, at most the cap."""
    TOKEN_MASK = "token_mask"
    """The same weight, and 0 for a token whose weight is not between floor and cap."""
    SEQUENCE_TRUNCATE = "sequence_truncate"
    """Each response's loss is weighted by its probability ratio, at most the cap."""
    SEQUENCE_MASK = "sequence_mask"
    """The same weight, and 0 for a response whose weight is not between floor and cap."""


class PreferenceLoss(StrEnum):
    """The loss on preferences."""

    SIGMOID = "sigmoid"
    """DPO; with label_smoothing, cDPO."""
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    APO_ZERO = "apo_zero"
    APO_DOWN = "apo_down"
    SIMPO = "simpo"
    ORPO = "orpo"
    KTO = "kto"
    """From single responses, each desirable or not."""


REFERENCE_FREE = frozenset({PreferenceLoss.SIMPO, PreferenceLoss.ORPO})
"""The losses that need no log-probs of a reference."""


class RewardObjective(StrEnum):
    """The objective of a reward model."""

    BRADLEY_TERRY = "bradley_terry"
    """Preference pairs."""
    REGRESSION = "regression"
    """Responses with a rating each."""
    PROCESS = "process"
    """Responses whose steps are labelled right or wrong."""


class StepReward(StrEnum):
    """How the probabilities that a response's steps are right become one reward."""

    MIN = "min"
    PRODUCT = "product"
    LAST = "last"
