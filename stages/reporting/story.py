"""The run in words: what was done, whether it helped, and what to doubt. Plain text, no markup."""

from dataclasses import dataclass

from stages.contracts.params import Params
from stages.contracts.rl import Reward
from stages.reporting.comparison import Outcome, Pair, Verdict, count, judge
from stages.reporting.evidence import Evidence
from stages.reporting.family import ROOT, Family
from stages.reporting.vocabulary import Format, write

_REWARD_WORDS = {
    Reward.REWARD_MODEL: "a reward model trained on preference pairs",
    Reward.VERIFIER: "a rule that checks the answer",
}


@dataclass(frozen=True)
class Story:
    verdict: Verdict
    headline: str
    lead: str
    method: str
    caveats: tuple[str, ...]


def tell(params: Params, family: Family, evidence: Evidence, pairs: list[Pair]) -> Story:
    """Draw the conclusions that the numbers allow."""
    verdict = judge(pairs)
    before = write(evidence.evaluations[ROOT]["accuracy"], Format.SHARE)
    after = write(evidence.evaluations[family.final]["accuracy"], Format.SHARE)
    headline = {
        Verdict.BETTER: f"It learned: accuracy rose from {before} to {after}",
        Verdict.WORSE: f"It got worse: accuracy fell from {before} to {after}",
        Verdict.UNCLEAR: f"No clear change: accuracy was {before} and is now {after}",
    }[verdict]
    return Story(
        verdict=verdict,
        headline=headline,
        lead=_lead(family, pairs),
        method=_method(params, family),
        caveats=tuple(_caveats(family, evidence, verdict)),
    )


def _lead(family: Family, pairs: list[Pair]) -> str:
    right_before = sum(pair.before.correct for pair in pairs)
    right_after = sum(pair.after.correct for pair in pairs)
    counts = count(pairs)
    return (
        f"Of {len(pairs):,} held-out prompts, which no training step has seen, the final policy "
        f"{family.final} answers {right_after:,} exactly right; the supervised policy answered "
        f"{right_before:,}. {counts[Outcome.IMPROVED]:,} went from wrong to right, "
        f"{counts[Outcome.REGRESSED]:,} from right to wrong."
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
        f"{', then '.join(parts)} from SFT to {family.final}, "
        f"rewards from {_REWARD_WORDS[params.rl.reward]}"
    )


def _caveats(family: Family, evidence: Evidence, verdict: Verdict) -> list[str]:
    caveats = []
    if verdict is Verdict.UNCLEAR:
        caveats.append(
            "Too few prompts changed sides to tell this difference from chance. More held-out "
            "prompts or more iterations would decide it."
        )
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]
    best = max(family.policies, key=lambda policy: evidence.evaluations[policy]["accuracy"])
    if evidence.evaluations[best]["accuracy"] > last["accuracy"]:
        share = write(evidence.evaluations[best]["accuracy"], Format.SHARE)
        caveats.append(
            f"{best} is more accurate ({share}) than {family.final}, which counts as final because "
            "it is the last that params.yaml names."
        )
    if last["reward_mean"] > first["reward_mean"] and verdict is Verdict.WORSE:
        caveats.append(
            "Reward rose while accuracy fell: the policy has probably learned to please the reward "
            "source rather than to answer right."
        )
    return caveats
