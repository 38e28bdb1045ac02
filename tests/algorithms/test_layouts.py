"""No loss depends on padding, packing, row order, micro-batches or ranks, and all are right.

Each is compared, value, gradient and metrics, with plain loops over the sequences.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.kl import kl_loss
from stages.algorithms.loss import Counts, Loss, LossAggregation
from stages.algorithms.policy_loss import Objective, entropy_bonus, policy_loss
from stages.algorithms.value_loss import value_loss
from stages.contracts.objectives import Aggregation, KlEstimator, PolicyObjective
from tests.algorithms.ragged import Batch, Outcome, Step, layouts, outcome, plain, steps
from tests.algorithms.reference import (
    entropy_terms,
    kl_terms,
    policy_terms,
    reference,
    value_terms,
)

SCALE = 5.0
LOW, HIGH, DUAL = 0.2, 0.28, 1.5
OBJECTIVES = [
    (PolicyObjective.CLIP, None),
    (PolicyObjective.CLIP, DUAL),
    (PolicyObjective.GSPO, None),
    (PolicyObjective.GSPO, DUAL),
    (PolicyObjective.CISPO, None),
    (PolicyObjective.GRADIENT, None),
]

everywhere = settings(max_examples=20, deadline=None)
aggregations = pytest.mark.parametrize("how", Aggregation)


@dataclass(frozen=True)
class Policy:
    objective: Objective
    weighted: bool

    def __call__(self, batch: Batch, counts: Counts) -> Loss:
        columns = batch.tensors
        return policy_loss(
            columns["logprobs"],
            columns["old_logprobs"],
            columns["advantages"],
            batch.tokens,
            counts,
            self.objective,
            weights=columns["weights"] if self.weighted else None,
        )


def _check(step: Step, seed: int, loss, leaf: str, *others: str, expected: Outcome) -> None:
    step = step.only(leaf, *others)
    outcome(step, plain(step), loss, leaf).assert_equals(expected, "one padded batch")
    for name, layout in layouts(step, random.Random(seed)):
        outcome(step, layout, loss, leaf).assert_equals(expected, name)


@aggregations
@pytest.mark.parametrize(("kind", "dual_clip"), OBJECTIVES)
@given(step=steps(), seed=st.integers(0, 2**32), weighted=st.booleans())
@everywhere
def test_the_policy_loss_is_the_papers_in_every_layout(step, seed, kind, dual_clip, weighted, how):
    loss = Policy(Objective(kind, LOW, HIGH, dual_clip, LossAggregation(how, SCALE)), weighted)
    terms = policy_terms(kind, LOW, HIGH, dual_clip)
    expected = reference(step, terms, how, SCALE, loss_metric="policy_loss", weighted=weighted)
    others = ["old_logprobs", "advantages", *["weights"] * weighted]
    _check(step, seed, loss, "logprobs", *others, expected=expected)


@aggregations
@pytest.mark.parametrize("estimator", KlEstimator)
@given(step=steps(), seed=st.integers(0, 2**32))
@everywhere
def test_the_kl_loss_is_the_papers_in_every_layout(step, seed, estimator, how):
    def loss(batch: Batch, counts: Counts) -> Loss:
        columns = batch.tensors
        return kl_loss(
            columns["logprobs"],
            columns["old_logprobs"],
            columns["ref_logprobs"],
            batch.tokens,
            counts,
            estimator,
            LossAggregation(how, SCALE),
        )

    expected = reference(step, kl_terms(estimator), how, SCALE, loss_metric="kl_loss")
    _check(step, seed, loss, "logprobs", "old_logprobs", "ref_logprobs", expected=expected)


@aggregations
@given(step=steps(), seed=st.integers(0, 2**32))
@everywhere
def test_the_entropy_bonus_is_the_same_in_every_layout(step, seed, how):
    def loss(batch: Batch, counts: Counts) -> Loss:
        aggregation = LossAggregation(how, SCALE)
        return entropy_bonus(batch.tensors["entropies"], batch.tokens, counts, aggregation)

    expected = reference(step, entropy_terms, how, SCALE)
    _check(step, seed, loss, "entropies", expected=expected)


@pytest.mark.parametrize("clip", [None, 0.3])
@given(step=steps(), seed=st.integers(0, 2**32))
@everywhere
def test_the_value_loss_is_the_papers_in_every_layout(step, seed, clip):
    def loss(batch: Batch, counts: Counts) -> Loss:
        columns = batch.tensors
        return value_loss(
            columns["values"],
            columns["old_values"],
            columns["returns"],
            batch.tokens,
            counts,
            clip=clip,
        )

    how = Aggregation.TOKEN_MEAN
    expected = reference(step, value_terms(clip), how, loss_metric="value_loss")
    _check(step, seed, loss, "values", "old_values", "returns", expected=expected)
