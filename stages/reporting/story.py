"""The run in words: what was done, whether it helped, and what to doubt. Plain text, no markup."""

import statistics
from dataclasses import dataclass

from stages.contracts.params import Params
from stages.contracts.rl import Reward
from stages.reporting.comparison import BeforeAfter, Outcome, PolicyOutcome, count, judge
from stages.reporting.evidence import Evidence, Metrics
from stages.reporting.family import ROOT, Family
from stages.reporting.vocabulary import Form, write

_REWARD_WORDS = {
    Reward.REWARD_MODEL: "a reward model trained on preference pairs",
    Reward.VERIFIER: "a rule that checks the answer",
}


EVEN = 0.5
"""A win rate that shows no difference."""


@dataclass(frozen=True)
class Story:
    outcome: PolicyOutcome
    headline: str
    lead: str
    method: str
    caveats: tuple[str, ...]


def tell(params: Params, family: Family, evidence: Evidence, pairs: list[BeforeAfter]) -> Story:
    """Draw the conclusions that the numbers allow."""
    outcome = judge(pairs)
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]
    is_judged = "accuracy" in first and "accuracy" in last
    return Story(
        outcome=outcome,
        headline=_by_accuracy(outcome, first, last) if is_judged else _by_reward(outcome, pairs),
        lead=_lead(family, pairs) if is_judged else _lead_by_reward(family, pairs),
        method=_method(params, family),
        caveats=tuple(_caveats(family, evidence, outcome)),
    )


def _by_accuracy(outcome: PolicyOutcome, first: Metrics, last: Metrics) -> str:
    before, after = (write(metrics["accuracy"], Form.SHARE) for metrics in (first, last))
    return {
        PolicyOutcome.BETTER: f"It learned: accuracy rose from {before} to {after}",
        PolicyOutcome.WORSE: f"It got worse: accuracy fell from {before} to {after}",
        PolicyOutcome.UNCLEAR: f"No clear change: accuracy was {before} and is now {after}",
    }[outcome]


def _by_reward(outcome: PolicyOutcome, pairs: list[BeforeAfter]) -> str:
    rate = write(statistics.fmean(pair.won for pair in pairs), Form.SHARE)
    start = {
        PolicyOutcome.BETTER: "It learned",
        PolicyOutcome.WORSE: "It got worse",
        PolicyOutcome.UNCLEAR: "No clear change",
    }[outcome]
    return f"{start}: by reward it wins {rate} against the supervised policy"


def _lead(family: Family, pairs: list[BeforeAfter]) -> str:
    judged = [pair for pair in pairs if pair.outcome.is_judged]
    right_before = sum(bool(pair.before.greedy.correct) for pair in judged)
    right_after = sum(bool(pair.after.greedy.correct) for pair in judged)
    counts = count(pairs)
    which = "" if len(judged) == len(pairs) else " with an answer to compare with"
    return (
        f"Of {len(judged):,} held-out prompts{which}, which no training step has seen, the final "
        f"policy {family.final} answers {right_after:,} exactly right; the supervised policy "
        f"answered {right_before:,}. {counts[Outcome.IMPROVED]:,} went from wrong to right, "
        f"{counts[Outcome.REGRESSED]:,} from right to wrong."
    )


def _lead_by_reward(family: Family, pairs: list[BeforeAfter]) -> str:
    counts = count(pairs)
    return (
        f"Of {len(pairs):,} held-out prompts, which no training step has seen, the final policy "
        f"{family.final} gets a higher reward than the supervised policy on "
        f"{counts[Outcome.HIGHER]:,}, a lower one on {counts[Outcome.LOWER]:,} and the same on "
        f"{counts[Outcome.SAME]:,}. The data do not say which answers are right."
    )


def _method(params: Params, family: Family) -> str:
    path = family.path(family.final)[1:]
    iterations = sum(policy not in family.preferences | family.online for policy in path)
    steps = sum(params.rl.online[policy].steps for policy in path if policy in family.online)
    parts = []
    if family.preferences.intersection(path):
        parts.append(f"preferences learnt directly ({params.preference.loss})")
    done = [
        f"1 {what}" if count == 1 else f"{count} {what}s"
        for count, what in ((iterations, "iteration"), (steps, "fused step"))
        if count
    ]
    if done:
        name = params.rl.algorithm.value.upper().replace("_", " ")
        parts.append(f"{name}, {' and '.join(done)}")
    return (
        f"{', then '.join(parts)} from SFT to {family.final}, rewards from {_reward_words(params)}"
    )


def _reward_words(params: Params) -> str:
    words = [
        _REWARD_WORDS[Reward(name)]
        if name in _REWARD_WORDS
        else f"{name} ({params.rewards[name].kind.replace('_', ' ')})"
        for name in params.score.weights or [params.rl.reward]
    ]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _caveats(family: Family, evidence: Evidence, outcome: PolicyOutcome) -> list[str]:
    caveats = []
    if outcome is PolicyOutcome.UNCLEAR:
        caveats.append(
            "Too few prompts changed sides to tell this difference from chance. More held-out "
            "prompts or more iterations would decide it."
        )
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]
    accuracy = {
        policy: metrics["accuracy"]
        for policy, metrics in evidence.evaluations.items()
        if "accuracy" in metrics
    }
    best = max(accuracy, key=accuracy.__getitem__, default=family.final)
    if family.final in accuracy and accuracy[best] > accuracy[family.final]:
        share = write(accuracy[best], Form.SHARE)
        caveats.append(
            f"{best} is more accurate ({share}) than {family.final}, which counts as final because "
            "it is the last that params.yaml names."
        )
    fell = outcome is PolicyOutcome.WORSE and family.final in accuracy
    if last["reward_mean"] > first["reward_mean"] and fell:
        caveats.append(
            "Reward rose while accuracy fell: the policy has probably learned to please the reward "
            "source rather than to answer right."
        )
    if (caveat := _about_length(last)) is not None:
        caveats.append(caveat)
    return caveats


def _about_length(last: Metrics) -> str | None:
    """Wins that are gone where the responses are equally long."""
    similar = last.get("win_rate_similar_length", 0.0)
    if last.get("win_rate_low", 0.0) <= EVEN or similar > EVEN:
        return None
    by_length = (
        f"but {write(similar, Form.SHARE)} where the responses are of similar length, which "
        f"{write(last['similar_length_share'], Form.SHARE)} are"
        if "win_rate_similar_length" in last
        else "but no two responses are of similar length"
    )
    return (
        f"By reward it wins {write(last['win_rate'], Form.SHARE)} against the supervised policy, "
        f"{by_length} (mean {write(last['greedy_length'])} tokens, before "
        f"{write(last['reference_greedy_length'])}): the reward may favour length as such."
    )
