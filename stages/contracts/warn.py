"""warn: from where on a policy's numbers are worth a warning.

A warning judges numbers and makes none, so no stage that computes them reads these keys: to change
one reruns the report alone. The rules are in stages/health.py, each explained in docs/warnings.md.
"""

from pydantic import Field

from stages.contracts.base import Section


class WarnParams(Section):
    """Thresholds of the warnings; null switches one off."""

    entropy_share: float | None = Field(default=0.2, gt=0, lt=1)
    """Entropy collapse: below this share of the SFT policy's entropy."""
    kl: float | None = Field(default=0.5, gt=0)
    """KL blow-up: nats per token from the SFT policy; below `policy_update.max_kl`, which stops."""
    kl_growth: float | None = Field(default=3.0, gt=1)
    """KL blow-up: more than so many times the KL of the policy that it started from."""
    kl_floor: float = Field(default=0.1, ge=0)
    """Growth of a KL below this gives no warning."""
    reward_iterations: int | None = Field(default=3, ge=1)
    """Reward standing still: over so many policies in a row."""
    reward_gain: float = Field(default=0.05, ge=0)
    """What counts as a rise: more than this many standard deviations of the reward."""
    length_ratio: float | None = Field(default=2.0, gt=1)
    """Length drift: responses so many times longer or shorter than the SFT policy's."""
    truncation: float | None = Field(default=0.3, gt=0, lt=1)
    """Truncation: more than this share of responses is cut at `rollout.max_new_tokens`."""
    flat_groups: float | None = Field(default=0.9, gt=0, lt=1)
    """Groups without signal: more than this share of prompts has responses of equal reward."""
    reward_accuracy: float | None = Field(default=0.6, gt=0.5, lt=1)
    """Reward near chance: the reward source ranks less than this share of held-out pairs right."""
    sft_accuracy: float | None = Field(default=0.01, gt=0, lt=1)
    """SFT policy never right: less than this share of its samples is right."""
    wrong_lead: float | None = Field(default=0.0, ge=0)
    """Wrong rewarded most: a wrong answer's reward is above every right one's by more than this."""
    solved: float | None = Field(default=0.95, gt=0, le=1)
    """Sampled accuracy above which entropy, flat groups and still reward give no warning."""
