"""The warnings of all policies, as the report shows them: one for each kind, with whom it concerns.

A policy that has collapsed has descendants that have, too. Each kind is said once, in the words of
the policy that params.yaml names last, so that a long run does not drown the page in repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.contracts.warn import WarnParams
from stages.evaluation.answers import Answered
from stages.health import Reading, Symptom, WarningKind, judge, judge_family
from stages.reporting.evidence import Evidence
from stages.reporting.family import Family

_MOST_NAMES = 6


@dataclass(frozen=True)
class Concern:
    """One kind of warning."""

    kind: WarningKind
    title: str
    policies: tuple[str, ...]
    last: Symptom
    """That of the last of the policies."""

    @property
    def names(self) -> str:
        """The policies, or as many as fit in a line."""
        if len(self.policies) <= _MOST_NAMES:
            return ", ".join(self.policies)
        return f"{self.policies[0]}, …, {self.policies[-1]} ({len(self.policies)} policies)"


def collect(family: Family, evidence: Evidence, warn: WarnParams) -> list[Concern]:
    """Judge every policy by its held-out numbers and by how it was trained."""
    readings = {
        policy: Reading(
            policy,
            {
                **_training(policy, evidence),
                **_answers(evidence.answered[policy]),
                **evidence.evaluations[policy],
            },
        )
        for policy in family.policies
    }
    source = Reading("the reward source", evidence.reward)
    symptoms = [*judge([source], warn), *judge_family(family.parents, readings, warn)]
    concerns = []
    for kind in WarningKind:
        of_kind = [symptom for symptom in symptoms if symptom.kind is kind]
        if of_kind:
            policies = tuple(symptom.policy for symptom in of_kind)
            title = kind.words[:1].upper() + kind.words[1:]
            concerns.append(Concern(kind, title, policies, of_kind[-1]))
    return concerns


def _answers(answered: Sequence[Answered]) -> dict[str, float]:
    """How far the best rewarded wrong answer is above the best rewarded right one."""
    right = [item.greedy.reward for item in answered if item.greedy.correct]
    wrong = [item.greedy.reward for item in answered if item.greedy.correct is False]
    return {"wrong_lead": max(wrong) - max(right)} if right and wrong else {}


def _training(policy: str, evidence: Evidence) -> dict[str, float]:
    """The one number of training that held-out prompts cannot tell."""
    update = evidence.training.get(policy, {}).get("policy_update", {})
    return {name: update[name] for name in ("zero_variance_share",) if name in update}
