"""The cause of a loss or gradient that is not finite: which weight, or which row.

Looked for only once a step has failed, so it may cost what it likes. Each rank looks through its
own share, and all of them say what any of them found. Where passes through a model are collectives,
the ranks go through their rows in step, forward only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch

from stages.algorithms.loss import Loss
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import AnyLearner

NAMED = 5
"""Rows that a message names."""


def explain(
    ranks: Ranks,
    learners: Mapping[str, AnyLearner],
    share: Sequence[int],
    loss_of: Callable[[int], Loss],
    survey_of: Callable[[int], Mapping[str, float]] | None,
    describe: Callable[[int], str],
    seed: int,
) -> str:
    """In words; every rank calls it, with its own share of the step's rows."""
    weights = _first_of(ranks, _bad_weights(learners))
    if weights:
        return f"its weights are not finite already, first {weights[0]}: lower the learning rate"
    in_step = any(learner.lockstep for learner in learners.values())
    turns = _turns(ranks, share) if in_step else [(row, True) for row in share]

    def found_by(wrong_with: Callable[[int], Iterable[str]]) -> list[str]:
        names = (
            f"{describe(row)} ({wrong})"
            for row, is_own in turns
            for wrong in wrong_with(row)
            if is_own
        )
        return _first_of(ranks, names, in_step)

    culprits = found_by(partial(_wrong_in, survey_of)) if survey_of else []
    # A number of the whole step that is not finite spoils every row's loss.
    culprits = culprits or found_by(lambda row: _wrong_with(row, learners, loss_of, seed, in_step))
    if not culprits:
        return (
            "each of its rows alone is finite, so their sum is too large for the type of number, "
            "or what was drawn at random made it so: lower the learning rate"
        )
    more = " and maybe more" if len(culprits) >= NAMED else ""
    return f"look at {'; '.join(culprits[:NAMED])}{more}"


def _first_of(ranks: Ranks, names: Iterator[str], to_the_end: bool = False) -> list[str]:
    """The first few of what each rank finds; `to_the_end` where none may stop before the others."""
    own = list(names) if to_the_end else list(islice(names, NAMED))
    return [name for of_rank in ranks.gather_shares(own[:NAMED]) for name in of_rank]


def _turns(ranks: Ranks, share: Sequence[int]) -> list[tuple[int, bool]]:
    """The rows of this rank, and others until it has made as many passes as any rank."""
    shares = ranks.gather(list(share))
    filler = next(row for of_rank in shares for row in of_rank)
    missing = max(map(len, shares)) - len(share)
    return [(row, True) for row in share] + missing * [(filler, False)]


def _bad_weights(learners: Mapping[str, AnyLearner]) -> Iterator[str]:
    for of, learner in learners.items():
        for name in learner.weights_not_finite():
            yield f"{name} of the {of.replace('_', ' ')}"


def _wrong_in(survey_of: Callable[[int], Mapping[str, float]], row: int) -> Iterable[str]:
    with torch.no_grad():
        surveyed = survey_of(row)
    for name, value in surveyed.items():
        if not math.isfinite(value):
            yield f"its {name} alone is {value}"


def _wrong_with(
    row: int,
    learners: Mapping[str, AnyLearner],
    loss_of: Callable[[int], Loss],
    seed: int,
    forward_only: bool,
) -> Iterable[str]:
    """The first cause."""
    torch.manual_seed(seed)
    for learner in learners.values():
        for _, parameter in learner.named_parameters():
            parameter.grad = None
    with torch.set_grad_enabled(not forward_only):
        loss = loss_of(row)
    parts = {"loss": loss.value, **{name: metric.value for name, metric in loss.metrics.items()}}
    for name, value in parts.items():
        number = float(value.detach())
        if not math.isfinite(number):
            yield f"its {name} alone is {number}"
            return
    if forward_only:
        return
    loss.value.backward()  # type: ignore[no-untyped-call]
    for learner in learners.values():
        for name, parameter in learner.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                yield f"the gradient of {name} by it alone is not finite"
                return
