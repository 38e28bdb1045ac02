"""Distillation: the divergence of whole vocabularies, what coarsening does to it, any layout."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.distillation import sampled_advantages, topk_reverse_kl
from stages.algorithms.loss import Loss, LossAggregation, Per, Tokens
from stages.contracts.objectives import Aggregation
from tests.algorithms.layouts import (
    MicroBatch,
    counts_of,
    in_any_layout,
    num_tokens,
    random_field,
    slopes,
    unit_lengths,
)

VOCABULARY = 6


def distributions(num: int, seed: int) -> Tensor:
    """[num, V] log-probs."""
    return (2 * random_field(num, seed, VOCABULARY)).log_softmax(-1)


def exact_kl(student: list[float], teacher: list[float]) -> float:
    return sum(math.exp(p) * (p - q) for p, q in zip(student, teacher, strict=True))


def coarsened_kl(student: list[float], teacher: list[float]) -> float:
    """Over the listed tokens and one bucket for the rest."""
    rest, teacher_rest = (1 - sum(map(math.exp, listed)) for listed in (student, teacher))
    return exact_kl(student, teacher) + rest * math.log(rest / teacher_rest)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over positions, [N, K]."""
    tokens = Tokens.padded(torch.ones(student.shape[:-1])[None])
    how = LossAggregation(Aggregation.TOKEN_MEAN)
    return topk_reverse_kl(student[None], teacher[None], tokens, tokens.counts(), how).value


@pytest.mark.parametrize("how", list(Aggregation))
@given(data=st.data(), lengths=unit_lengths(1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_does_not_depend_on_its_layout(how, data, lengths, seed):
    student, teacher = (distributions(num_tokens(lengths), seed + n)[:, :3] for n in (0, 1))
    counts = counts_of(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        loss = topk_reverse_kl(
            laid, batch.lay(teacher), batch.tokens, counts, LossAggregation(how, 5.0)
        )
        assert loss.metrics["distillation_kl"].per is Per.TOKEN
        return loss

    plain = in_any_layout(data, lengths, student, share)

    by_token = [coarsened_kl(p, q) for p, q in zip(student.tolist(), teacher.tolist(), strict=True)]
    assert float(plain.metrics["distillation_kl"]) == pytest.approx(sum(by_token) / len(by_token))
    parts = torch.tensor(by_token).split([length for (length,) in lengths])
    expected = {
        Aggregation.TOKEN_MEAN: sum(by_token) / len(by_token),
        Aggregation.SEQUENCE_MEAN_TOKEN_MEAN: sum(float(p.mean()) for p in parts if len(p))
        / counts.sequences,
        Aggregation.SEQUENCE_MEAN_TOKEN_SUM: sum(by_token) / (5 * counts.sequences),
    }[how]
    assert float(plain.value) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 2**31), num=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_whole_vocabulary_gives_the_exact_divergence(seed, num):
    student, teacher = distributions(num, seed), distributions(num, seed + 1)
    exact = [exact_kl(p, q) for p, q in zip(student.tolist(), teacher.tolist(), strict=True)]
    ours = divergence(student, teacher)
    assert float(ours) == pytest.approx(sum(exact) / num, abs=1e-12)
    rounded = divergence(student.float(), teacher.float())
    assert float(rounded) == pytest.approx(float(ours), abs=2e-5)


@given(seed=st.integers(0, 2**31), k=st.integers(1, VOCABULARY))
@settings(max_examples=60, deadline=None)
def test_coarsening_never_exceeds_the_exact_divergence_and_more_tokens_come_closer(seed, k):
    student, teacher = distributions(1, seed), distributions(1, seed + 1)
    order = student.argsort(-1, descending=True)
    student, teacher = student.gather(1, order), teacher.gather(1, order)
    exact = exact_kl(student[0].tolist(), teacher[0].tolist())
    coarse = [float(divergence(student[:, :n], teacher[:, :n])) for n in (k - 1, k) if n]
    for lower, upper in pairwise([0.0, *coarse, exact]):
        assert lower <= upper + 1e-12


def test_one_listed_token_by_hand():
    student, teacher = torch.tensor([[0.8]]).log(), torch.tensor([[0.5]]).log()
    expected = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    assert float(divergence(student, teacher)) == pytest.approx(expected)


def test_the_gradient_of_the_logits_is_that_of_the_formula():
    logits, teacher = random_field(2, 5, VOCABULARY), distributions(2, 6)

    def formula(at: Tensor) -> float:
        rows = zip(at.log_softmax(-1)[:, :3].tolist(), teacher[:, :3].tolist(), strict=True)
        return sum(coarsened_kl(p, q) for p, q in rows) / 2

    leaf = logits.clone().requires_grad_()
    divergence(leaf.log_softmax(-1)[:, :3], teacher[:, :3]).backward()
    torch.testing.assert_close(leaf.grad, slopes(formula, logits), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certainty_and_disbelief_are_finite(dtype):
    certain = torch.tensor([[0.0, -1e4]], dtype=dtype)
    for student, teacher in ((certain, certain.flip(-1)), (certain, certain)):
        leaf = student.clone().requires_grad_()
        value = divergence(leaf, teacher)
        value.backward()
        assert value.isfinite()
        assert leaf.grad.isfinite().all()
    assert float(divergence(certain, certain)) == pytest.approx(0, abs=1e-6)


def test_a_student_that_agrees_with_its_teacher_rests():
    logits = random_field(3, 1, VOCABULARY).requires_grad_()
    student = logits.log_softmax(-1)[:, :2]
    value = divergence(student, student.detach())
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


def test_sampled_advantages_average_to_minus_the_divergence_and_bear_no_gradient():
    student, teacher = distributions(1, 3)[0], distributions(1, 4)[0]
    advantages = sampled_advantages(student.requires_grad_(), teacher)
    assert not advantages.requires_grad
    mean = float((student.detach().exp() * advantages).sum())
    assert mean == pytest.approx(-exact_kl(student.tolist(), teacher.tolist()))
