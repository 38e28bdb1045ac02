"""Warnings: training that goes wrong without failing, seen in a policy's metrics.

Pure functions of numbers, without torch, so that both planes judge alike: the report from its
evidence, the control plane from the files of the workspace and of a running job. A policy is judged
against those it descends from, never against a branch beside it. What was not measured, or is not
finite, is not judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stages.contracts.warn import WarnParams


class WarningKind(StrEnum):
    """The kinds of warnings."""

    ENTROPY_COLLAPSE = "entropy_collapse"
    KL_BLOW_UP = "kl_blow_up"
    REWARD_STANDING_STILL = "reward_standing_still"
    LENGTH_DRIFT = "length_drift"
    TRUNCATION = "truncation"
    FLAT_GROUPS = "flat_groups"
    REWARD_NEAR_CHANCE = "reward_near_chance"
    NOTHING_RIGHT = "nothing_right"
    WRONG_REWARDED_MOST = "wrong_rewarded_most"

    @property
    def words(self) -> str:
        return "KL blow-up" if self is WarningKind.KL_BLOW_UP else self.value.replace("_", " ")


ADVICE = {
    WarningKind.ENTROPY_COLLAPSE: (
        "raise policy_update.entropy_coef, policy_update.clip_high or rollout.temperature, and go "
        "on from a policy that still explores"
    ),
    WarningKind.KL_BLOW_UP: (
        "raise policy_update.kl_coef or lower policy_update.learning_rate, and read samples: the "
        "policy may have found a flaw of the reward"
    ),
    WarningKind.REWARD_STANDING_STILL: (
        "look whether the reward still tells good responses from bad ones; then more "
        "rollout.samples, a higher policy_update.learning_rate or harder prompts; or stop here"
    ),
    WarningKind.LENGTH_DRIFT: (
        "read samples: the reward may favour long or short responses as such; against length work "
        "score.overlong_penalty and a policy_update.aggregation that does not weigh by it"
    ),
    WarningKind.TRUNCATION: (
        "raise rollout.max_new_tokens (and model.max_length), or have long responses cost "
        "something: score.missing_eos_penalty, score.overlong_buffer"
    ),
    WarningKind.FLAT_GROUPS: (
        "choose prompts that are neither too easy nor too hard, raise rollout.samples, or draw a "
        "rollout.reserve so that groups without signal are replaced"
    ),
    WarningKind.REWARD_NEAR_CHANCE: (
        "more or cleaner preferences, more reward_model.epochs, or another reward source: what is "
        "learnt from this one is mostly noise"
    ),
    WarningKind.NOTHING_RIGHT: (
        "train SFT for longer or on more demonstrations, check that evaluate.correct can find the "
        "answer in a response, or begin with easier prompts"
    ),
    WarningKind.WRONG_REWARDED_MOST: (
        "read that sample: what it has is what the policy will be pushed towards; fix the reward, "
        "or hold the policy closer with policy_update.kl_coef"
    ),
}


@dataclass(frozen=True)
class Reading:
    """What was measured of a policy; empty where nothing was."""

    policy: str
    metrics: Mapping[str, float]

    def get(self, metric: str) -> float | None:
        """The metric, if it is there and a number at all."""
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Symptom:
    """A warning: which policy, which number against which threshold, in words."""

    kind: WarningKind
    policy: str
    metric: str
    value: float
    threshold: float
    """What `value` was compared with."""
    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence} (to try: {self.advice})"


Line = Sequence[Reading]
"""A policy's ancestry: the SFT policy first, the policy itself last."""
Finding = tuple[float, float, str] | None
"""A value, what it was compared with, and a sentence; None: nothing to warn of."""


def judge(line: Line, warn: WarnParams) -> tuple[Symptom, ...]:
    """What to warn of in the last of the line, in the order of the kinds."""
    symptoms = []
    for kind, (metric, rule) in RULES.items():
        value = line[-1].get(metric)
        finding = None if value is None else rule(value, line, warn)
        if finding is not None:
            symptoms.append(Symptom(kind, line[-1].policy, metric, *finding, ADVICE[kind]))
    return tuple(symptoms)


def judge_family(
    parents: Mapping[str, str], readings: Mapping[str, Reading], warn: WarnParams
) -> list[Symptom]:
    """What to warn of in each policy that was measured, along the branch it is on."""
    return [
        symptom
        for policy in readings
        for symptom in judge(
            [readings.get(name, Reading(name, {})) for name in ancestry(policy, parents)], warn
        )
    ]


def ancestry(policy: str, parents: Mapping[str, str]) -> list[str]:
    """From the SFT policy, which has no parent, to the policy."""
    names = [policy]
    while names[-1] in parents:
        names.append(parents[names[-1]])
    return names[::-1]


def _entropy_collapse(value: float, line: Line, warn: WarnParams) -> Finding:
    """A policy that is right knows what to say, and is as decided as one that has collapsed."""
    start = _start(line, "entropy")
    if warn.entropy_share is None or start is None or _is_solved(line, warn):
        return None
    before = start.metrics["entropy"]
    limit = warn.entropy_share * before
    if value >= limit:
        return None
    sentence = (
        f"entropy of {line[-1].policy} is {value:.3g}, less than {warn.entropy_share:g} of "
        f"{start.policy}'s {before:.3g}: it hardly explores any more"
    )
    return value, limit, sentence


def _kl_blow_up(value: float, line: Line, warn: WarnParams) -> Finding:
    is_so = f"KL of {line[-1].policy} to the reference is {value:.3g} nats per token"
    if warn.kl is not None and value > warn.kl:
        return value, warn.kl, f"{is_so}, above {warn.kl:g}"
    # The first step away from SFT, where KL is 0, is growth by any factor.
    before = line[-2].get("kl_to_reference") if len(line) > 2 else None
    if warn.kl_growth is None or before is None or value <= warn.kl_floor:
        return None
    limit = max(warn.kl_growth * before, warn.kl_floor)
    if value <= limit:
        return None
    sentence = f"{is_so}, more than {warn.kl_growth:g} times {line[-2].policy}'s {before:.3g}"
    return value, limit, sentence


def _reward_standing_still(_value: float, line: Line, warn: WarnParams) -> Finding:
    measured = [reading for reading in line if reading.get("reward_mean") is not None]
    count = warn.reward_iterations
    if count is None or len(measured) <= count or _is_solved(line, warn):
        return None
    earlier, recent = measured[:-count], measured[-count:]
    before = max(reading.metrics["reward_mean"] for reading in earlier)
    best = max(reading.metrics["reward_mean"] for reading in recent)
    spread = max((reading.get("reward_std") or 0.0) for reading in recent)
    limit = before + warn.reward_gain * spread
    if best > limit:
        return None
    sentence = (
        f"the best reward of the last {count} policies up to {line[-1].policy} is {best:.3g}, of "
        f"those before {before:.3g}: no rise by more than {warn.reward_gain:g} of its spread "
        f"{spread:.3g}"
    )
    return best, limit, sentence


def _length_drift(value: float, line: Line, warn: WarnParams) -> Finding:
    start = _start(line, "response_length")
    if warn.length_ratio is None or start is None:
        return None
    before = start.metrics["response_length"]
    shortest, longest = before / warn.length_ratio, before * warn.length_ratio
    if shortest <= value <= longest:
        return None
    is_long = value > longest
    how = "more than {:g} times" if is_long else "less than 1/{:g} of"
    sentence = (
        f"responses of {line[-1].policy} have {value:.3g} tokens, {how.format(warn.length_ratio)} "
        f"{start.policy}'s {before:.3g}"
    )
    limit = longest if is_long else shortest
    return value, limit, sentence


def _truncation(value: float, line: Line, warn: WarnParams) -> Finding:
    if warn.truncation is None or value <= warn.truncation:
        return None
    sentence = (
        f"{value:.0%} of {line[-1].policy}'s responses are cut off, more than {warn.truncation:.0%}"
    )
    return value, warn.truncation, sentence


def _flat_groups(value: float, line: Line, warn: WarnParams) -> Finding:
    if warn.flat_groups is None or value <= warn.flat_groups or _is_solved(line, warn):
        return None
    sentence = (
        f"{value:.0%} of the prompts that {line[-1].policy} learnt from have responses of one and "
        f"the same reward, more than {warn.flat_groups:.0%}: they teach nothing"
    )
    return value, warn.flat_groups, sentence


def _reward_near_chance(value: float, line: Line, warn: WarnParams) -> Finding:
    limit = warn.reward_accuracy
    if limit is None or value >= limit:
        return None
    sentence = (
        f"{line[-1].policy} ranks {value:.0%} of the held-out pairs right, less than {limit:.0%}: "
        "a coin toss is right on 50%"
    )
    return value, limit, sentence


def _nothing_right(value: float, line: Line, warn: WarnParams) -> Finding:
    """Of the SFT policy alone: what starts from it is judged by what it makes of that."""
    limit = warn.sft_accuracy
    if limit is None or len(line) > 1 or value >= limit:
        return None
    sentence = (
        f"{value:.1%} of {line[-1].policy}'s samples are right, less than {limit:.1%}: a reward "
        "for right answers has hardly anything to make likelier"
    )
    return value, limit, sentence


def _wrong_rewarded_most(value: float, line: Line, warn: WarnParams) -> Finding:
    limit = warn.wrong_lead
    if limit is None or value <= limit:
        return None
    sentence = (
        f"of {line[-1].policy}'s greedy responses a wrong one has the highest reward, {value:.3g} "
        "above every right one"
    )
    return value, limit, sentence


RULES: Mapping[WarningKind, tuple[str, Callable[[float, Line, WarnParams], Finding]]] = {
    WarningKind.ENTROPY_COLLAPSE: ("entropy", _entropy_collapse),
    WarningKind.KL_BLOW_UP: ("kl_to_reference", _kl_blow_up),
    WarningKind.REWARD_STANDING_STILL: ("reward_mean", _reward_standing_still),
    WarningKind.LENGTH_DRIFT: ("response_length", _length_drift),
    WarningKind.TRUNCATION: ("truncation_rate", _truncation),
    WarningKind.FLAT_GROUPS: ("zero_variance_share", _flat_groups),
    WarningKind.REWARD_NEAR_CHANCE: ("pairwise_accuracy", _reward_near_chance),
    WarningKind.NOTHING_RIGHT: ("accuracy_sampled", _nothing_right),
    WarningKind.WRONG_REWARDED_MOST: ("wrong_lead", _wrong_rewarded_most),
}
"""Of each kind, the metric and the rule that judges its value, where the policy has one."""


def _start(line: Line, metric: str) -> Reading | None:
    """Where RL started: the first ancestor of which the metric is known and above 0."""
    return next((reading for reading in line[:-1] if (reading.get(metric) or 0.0) > 0), None)


def _is_solved(line: Line, warn: WarnParams) -> bool:
    """Whether hardly anything is left to learn, by the nearest measurement of its accuracy.

    Not of its reward, because of that it is not known where its top is.
    """
    if warn.solved is None:
        return False
    known = (reading.get("accuracy_sampled") for reading in reversed(line))
    return next((value for value in known if value is not None), 0.0) >= warn.solved
