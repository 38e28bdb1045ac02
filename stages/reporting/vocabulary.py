"""Every metric that the report shows: its name in words, one sentence about it, its format."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Form(Enum):
    """How a value is written."""

    SHARE = auto()
    """A fraction of one, written as a percentage."""
    COUNT = auto()
    NUMBER = auto()
    NATS = auto()
    """A number that is 0 but for rounding where it is tiny."""


@dataclass(frozen=True)
class Metric:
    label: str
    meaning: str
    format: Form = Form.NUMBER


MISSING = "–"
_PASS_AT = re.compile(r"pass_at_(\d+)")

EVALUATION = {
    "accuracy": Metric(
        "Accuracy",
        "Share of held-out prompts whose final answer is exactly right when the policy always "
        "takes its likeliest next token (greedy).",
        Form.SHARE,
    ),
    "accuracy_sampled": Metric(
        "Sampled accuracy",
        "The same share when tokens are drawn at random from the policy’s own probabilities, as "
        "they are in training.",
        Form.SHARE,
    ),
    "majority_vote": Metric(
        "Majority vote",
        "Share of prompts where the answer that most of the sampled responses give is right.",
        Form.SHARE,
    ),
    "win_rate": Metric(
        "Win rate",
        "Share of prompts where the policy’s greedy response has a higher reward than the SFT "
        "policy’s; a tie counts half, so 50% is no difference.",
        Form.SHARE,
    ),
    "win_rate_sampled": Metric(
        "Win rate, sampled", "The same among all pairs of sampled responses.", Form.SHARE
    ),
    "win_rate_similar_length": Metric(
        "Win rate, similar length",
        "The same where the two greedy responses differ in length by at most a fifth: reward "
        "models often favour length as such.",
        Form.SHARE,
    ),
    "reward_mean": Metric(
        "Reward",
        "Mean score that the reward source gives to responses; it is what training pushes up, so "
        "it should rise together with accuracy.",
    ),
    "reward_gain": Metric(
        "Reward gained",
        "Mean difference from the SFT policy’s reward on the same prompts; its error is smaller "
        "than those of the two, as easy prompts are easy for both.",
    ),
    "reward_std": Metric(
        "Reward spread", "Standard deviation of the reward over responses; the shaded band."
    ),
    "kl_to_reference": Metric(
        "KL to the reference",
        "How far the policy has moved from the supervised one, in nats per token; 0 means not at "
        "all, and large values often mean that it exploits the reward.",
        Form.NATS,
    ),
    "entropy": Metric(
        "Entropy",
        "How undecided the policy is about the next token, in nats; near 0 it no longer explores.",
    ),
    "response_length": Metric(
        "Response length", "Mean number of tokens in a response, its end token included."
    ),
    "truncation_rate": Metric(
        "Truncated",
        "Share of responses that were cut because they did not end in time.",
        Form.SHARE,
    ),
    "num_prompts": Metric(
        "Held-out prompts", "Prompts that no training step has seen.", Form.COUNT
    ),
    "pairwise_accuracy": Metric(
        "Pairwise accuracy",
        "How often the reward source scores the better response of a held-out pair higher; 50% is "
        "a coin toss.",
        Form.SHARE,
    ),
}

TRAINING = {
    **EVALUATION,
    "num_prompts": Metric("Prompts", "Prompts whose responses were learnt from.", Form.COUNT),
    "num_responses": Metric("Responses learnt from", "Those of these prompts.", Form.COUNT),
    "num_sequences": Metric("Responses", "Responses sampled to train on.", Form.COUNT),
    "num_tokens": Metric("Tokens", "Tokens in those responses.", Form.COUNT),
    "num_steps": Metric("Optimizer steps", "Times the weights were changed.", Form.COUNT),
    "loss": Metric("Loss", "All that the optimizer lowers, together."),
    "policy_loss": Metric(
        "Policy loss",
        "What the policy’s optimizer lowers; its sign and size mean little by themselves.",
    ),
    "value_loss": Metric(
        "Value loss", "How badly the critic predicts the return of a token (PPO)."
    ),
    "explained_variance": Metric(
        "Explained variance",
        "Share of the returns’ variance that the critic foresees: 1 is perfect, 0 or less is "
        "useless (PPO).",
    ),
    "approx_kl": Metric(
        "KL of this update", "How far this iteration alone moved the policy, in nats per token."
    ),
    "clip_fraction_low": Metric(
        "Clipped low",
        "Share of tokens whose probability fell past the clip range and that stopped counting.",
        Form.SHARE,
    ),
    "clip_fraction_high": Metric(
        "Clipped high",
        "Share of tokens whose probability rose past the clip range and that stopped counting.",
        Form.SHARE,
    ),
    "ratio_min": Metric(
        "Smallest ratio", "Largest fall of a token’s probability: new divided by old."
    ),
    "ratio_max": Metric(
        "Largest ratio", "Largest rise of a token’s probability: new divided by old."
    ),
    "advantage_std": Metric(
        "Advantage spread", "Standard deviation of how much better than expected responses were."
    ),
    "grad_norm": Metric("Gradient norm", "Mean size of the gradient before it is scaled down."),
    "critic_grad_norm": Metric("Critic’s gradient norm", "The same, of the critic (PPO)."),
    "logprob_gap_mean": Metric(
        "Log-prob gap, mean",
        "Mean difference between sampler and trainer on the same token; anything but tiny means "
        "that they do not run the same model.",
    ),
    "logprob_gap_max": Metric("Log-prob gap, largest", "The largest such difference."),
    "effective_samples": Metric(
        "Effective samples",
        "What that difference leaves of the responses’ weight; all of it is best.",
        Form.SHARE,
    ),
    "mismatch_masked": Metric(
        "Tokens masked", "Left out because sampler and trainer differ too much.", Form.SHARE
    ),
    "mismatch_truncated": Metric(
        "Weights cut", "Tokens whose importance weight was cut to the cap.", Form.SHARE
    ),
    "zero_variance_share": Metric(
        "Groups without signal",
        "Share of prompts whose responses all got the same reward: they teach nothing.",
        Form.SHARE,
    ),
    "value_clip_fraction": Metric(
        "Values clipped",
        "Share of tokens whose value had moved past the clip range.",
        Form.SHARE,
    ),
    "kl_coef": Metric("KL coefficient", "Weight of the distance from the SFT policy."),
    "kl_loss": Metric("KL in the loss", "The KL term before its weight."),
    "learning_rate": Metric("Learning rate", "Step size of the last step."),
    "preference_accuracy": Metric(
        "Pairs ranked right",
        "Share of training pairs whose chosen response the policy now favours more.",
        Form.SHARE,
    ),
    "reward_margin": Metric(
        "Reward margin", "Mean difference of the rewards that the policy implies for a pair."
    ),
    "label_accuracy": Metric(
        "Labels met",
        "Share of responses moved in the direction of their label.",
        Form.SHARE,
    ),
    "distillation_kl": Metric("KL to the teacher", "Nats per token on the policy’s own responses."),
    "kept_share": Metric("Responses kept", "Share that was good enough to imitate.", Form.SHARE),
    "kept_reward_mean": Metric("Reward of those kept", "Their mean reward."),
}


def describe(name: str) -> Metric:
    """The metric of that name; one that is not known here is shown under its own name."""
    if chances := _PASS_AT.fullmatch(name):
        k = chances[1]
        meaning = f"Chance that of {k} sampled responses at least one is right."
        return Metric(f"Pass@{k}", meaning, Form.SHARE)
    whole, slash, part = name.partition("/")
    if slash and whole in TRAINING:
        known = TRAINING[whole]
        return Metric(f"{known.label}: {part}", f"Of {part} alone.", known.format)
    return TRAINING.get(name) or Metric(spell_out(name), "")


def in_order(names: Iterable[str]) -> list[str]:
    """Metrics in the order of this page, so that an explanation may refer to the one before it."""
    ranks = {name: rank for rank, name in enumerate(TRAINING)}
    return sorted(names, key=lambda name: (ranks.get(name.partition("/")[0], len(ranks)), name))


def pass_metrics(names: Iterable[str]) -> list[str]:
    """Those of the names that are a pass@k, the smallest k first."""
    k_of = {name: int(chances[1]) for name in names if (chances := _PASS_AT.fullmatch(name))}
    return sorted(k_of, key=k_of.__getitem__)


def spell_out(name: str) -> str:
    """A metric's own name as words: `num_held_out` is Held out."""
    return name.removeprefix("num_").replace("_", " ").capitalize()


def write(value: float | None, form: Form = Form.NUMBER) -> str:
    """A value as text, short and with about three significant digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    return signed(_digits(value, form))


def write_interval(low: float | None, high: float | None) -> str:
    """Two shares as the ends of an interval: `52.1–63.8%`."""
    if low is None or high is None:
        return MISSING
    return f"{100 * low:.1f}–{100 * high:.1f}%"


def write_error(value: float | None, error: float | None, form: Form = Form.NUMBER) -> str:
    """One standard error with as many digits as the value beside it: `± 0.021`; none: empty."""
    if value is None or error is None or not math.isfinite(value + error):
        return ""
    if form is Form.SHARE:
        return f"± {100 * error:.1f}"
    digits = _digits(value, form)
    if digits == "0" or "e" in digits:
        return f"± {_digits(error, form)}" if error else ""
    return f"± {error:,.{len(digits.partition('.')[2])}f}"


def _digits(value: float, form: Form) -> str:
    if form is Form.SHARE:
        return f"{100 * value:.1f}%"
    if form is Form.COUNT:
        return f"{value:,.0f}"
    size = abs(value)
    if value == 0 or (form is Form.NATS and size < 1e-5):
        return "0"
    if size < 0.001:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 10 else f"{value:.3f}"


def write_change(before: float, after: float, form: Form = Form.NUMBER) -> str:
    """The difference with its sign; of shares in percentage points."""
    change = after - before
    if not math.isfinite(change):
        return MISSING
    text = f"{100 * change:+.1f} points" if form is Form.SHARE else f"{change:+.3f}"
    return "no change" if float(text.split()[0]) == 0 else signed(text)


def signed(text: str) -> str:
    """A number as text with a true minus sign, which is as wide as a plus."""
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
