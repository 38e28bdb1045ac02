"""No loss depends on padding, packing, row order, micro-batches or ranks, and all are right.

Each is compared, value, gradient and metrics, with plain loops over the sequences.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.kl import kl_loss
from stages.algorithms.loss import Counts, Loss, LossAggregation, Tokens
from stages.algorithms.policy_loss import Objective, entropy_bonus, policy_loss
from stages.algorithms.value_loss import value_loss
from stages.contracts.objectives import Aggregation, KlEstimator, PolicyObjective
from tests.algorithms.layouts import (
    MicroBatch,
    Outcome,
    assert_same,
    counts_of,
    outcome,
    splits,
    whole,
)
from tests.algorithms.reference import (
    Step,
    entropy_terms,
    kl_terms,
    policy_terms,
    reference,
    steps,
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
Column = Callable[[str], Tensor]

everywhere = settings(max_examples=20, deadline=None)
aggregations = pytest.mark.parametrize("how", Aggregation)


def check(
    data: st.DataObject,
    step: Step,
    leaf: str,
    loss: Callable[[Column, Tokens, Counts], Loss],
    expected: Outcome,
) -> None:
    """A loss of laid out columns, and its gradient by one of them, in several layouts."""
    counts = counts_of(step.lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        def column(name: str) -> Tensor:
            return laid if name == leaf else batch.lay(step.fields[name])

        return loss(column, batch.tokens, counts)

    for split in (whole(step.lengths), *(data.draw(splits(step.lengths)) for _ in range(3))):
        assert_same(outcome(split, step.fields[leaf], counts, share), expected)


@aggregations
@pytest.mark.parametrize(("kind", "dual_clip"), OBJECTIVES)
@given(data=st.data(), step=steps(), weighted=st.booleans())
@everywhere
def test_the_policy_loss_is_the_papers_in_every_layout(data, step, kind, dual_clip, weighted, how):
    objective = Objective(kind, LOW, HIGH, dual_clip, LossAggregation(how, SCALE))

    def loss(column: Column, tokens: Tokens, counts: Counts) -> Loss:
        return policy_loss(
            column("logprobs"),
            column("old_logprobs"),
            column("advantages"),
            tokens,
            counts,
            objective,
            weights=column("weights") if weighted else None,
        )

    terms = policy_terms(kind, LOW, HIGH, dual_clip)
    expected = reference(step, terms, how, SCALE, loss_metric="policy_loss", weighted=weighted)
    check(data, step, "logprobs", loss, expected)


@aggregations
@pytest.mark.parametrize("estimator", KlEstimator)
@given(data=st.data(), step=steps())
@everywhere
def test_the_kl_loss_is_the_papers_in_every_layout(data, step, estimator, how):
    def loss(column: Column, tokens: Tokens, counts: Counts) -> Loss:
        return kl_loss(
            column("logprobs"),
            column("old_logprobs"),
            column("ref_logprobs"),
            tokens,
            counts,
            estimator,
            LossAggregation(how, SCALE),
        )

    expected = reference(step, kl_terms(estimator), how, SCALE, loss_metric="kl_loss")
    check(data, step, "logprobs", loss, expected)


@aggregations
@given(data=st.data(), step=steps())
@everywhere
def test_the_entropy_bonus_is_the_same_in_every_layout(data, step, how):
    def loss(column: Column, tokens: Tokens, counts: Counts) -> Loss:
        return entropy_bonus(column("entropies"), tokens, counts, LossAggregation(how, SCALE))

    check(data, step, "entropies", loss, reference(step, entropy_terms, how, SCALE))


@pytest.mark.parametrize("clip", [None, 0.3])
@given(data=st.data(), step=steps())
@everywhere
def test_the_value_loss_is_the_papers_in_every_layout(data, step, clip):
    def loss(column: Column, tokens: Tokens, counts: Counts) -> Loss:
        return value_loss(
            column("values"), column("old_values"), column("returns"), tokens, counts, clip=clip
        )

    how = Aggregation.TOKEN_MEAN
    expected = reference(step, value_terms(clip), how, loss_metric="value_loss")
    check(data, step, "values", loss, expected)
