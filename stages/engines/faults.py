"""Why a step's numbers are not finite: which weight, or which of its rows.

Looked for only once a step has failed, so it may cost what it likes. Each rank looks through its
own share, and all of them say what any of them found.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from stages.algorithms.loss import Loss
from stages.engines.optimizer import Learner
from stages.engines.ranks import Ranks

NAMED = 5
"""Rows that a message names."""


def explain(
    ranks: Ranks,
    learners: Mapping[str, Learner],
    share: Sequence[int],
    loss_of: Callable[[int], Loss],
    survey_of: Callable[[int], Mapping[str, float]] | None,
    describe: Callable[[int], str],
    seed: int,
) -> str:
    """In words; every rank calls it, with its own share of the step's rows."""
    weights = next(_bad_weights(learners), None)
    if weights:
        return f"its weights are not finite already, first {weights}: lower the learning rate"
    spoilt: list[str] = []
    if survey_of:
        for row in share:
            spoilt += [f"{describe(row)} ({wrong})" for wrong in _wrong_in(survey_of, row)]
    bad: list[str] = []
    # A number of the whole step that is not finite spoils every row's loss.
    for row in () if spoilt else share:
        torch.manual_seed(seed)
        bad += [f"{describe(row)} ({wrong})" for wrong in _wrong_with(row, learners, loss_of)]
        if len(bad) == NAMED:
            break
    of_ranks = ranks.gather((spoilt, bad))
    found = [name for of_rank, _ in of_ranks for name in of_rank]
    found = found or [name for _, of_rank in of_ranks for name in of_rank]
    if not found:
        return (
            "each of its rows alone is finite, so their sum is too large for the type of number, "
            "or what was drawn at random made it so: lower the learning rate"
        )
    more = " and maybe more" if len(found) >= NAMED else ""
    return f"look at {'; '.join(found[:NAMED])}{more}"


def _bad_weights(learners: Mapping[str, Learner]) -> Iterator[str]:
    for of, learner in learners.items():
        for name, value in learner.model.named_parameters():
            if not bool(value.isfinite().all()):
                yield f"{name} of the {of.replace('_', ' ')}"


def _wrong_in(survey_of: Callable[[int], Mapping[str, float]], row: int) -> Iterable[str]:
    with torch.no_grad():
        surveyed = survey_of(row)
    for name, value in surveyed.items():
        if not math.isfinite(value):
            yield f"its {name} alone is {value}"


def _wrong_with(
    row: int, learners: Mapping[str, Learner], loss_of: Callable[[int], Loss]
) -> Iterable[str]:
    """What is wrong with it, the first thing only."""
    for learner in learners.values():
        for parameter in learner.parameters():
            parameter.grad = None
    loss = loss_of(row)
    parts = {"loss": loss.value, **{name: metric.value for name, metric in loss.metrics.items()}}
    for name, value in parts.items():
        number = float(value.detach())
        if not math.isfinite(number):
            yield f"its {name} alone is {number}"
            return
    loss.value.backward()  # type: ignore[no-untyped-call]
    for learner in learners.values():
        for name, parameter in learner.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                yield f"the gradient of {name} by it alone is not finite"
                return
