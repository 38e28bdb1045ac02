"""Every loss once more, in plain loops over float64 numbers, from the papers' formulas.

A term is a token's loss, its derivative by the token's own log-prob (or value), and what the token
adds to each metric. `reference` puts terms together sequence by sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from stages.contracts.objectives import Aggregation, KlEstimator, PolicyObjective
from tests.algorithms.layouts import Lengths, Outcome, counts_of, num_tokens, unit_lengths


@dataclass(frozen=True)
class Step:
    """An optimizer step of single responses, with the numbers of all its tokens, [N] each."""

    lengths: Lengths
    fields: Mapping[str, Tensor]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    lengths = draw(unit_lengths(1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.05, 0.5, 2.0]))  # between the log-probs of two policies

    def noise() -> Tensor:
        return torch.randn(num_tokens(lengths), generator=generator, dtype=torch.float64)

    logprobs, values = -(2 * noise()).abs() - 0.01, noise()
    fields = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + spread * noise(),
        "ref_logprobs": logprobs + spread * noise(),
        "advantages": noise() * (noise() > -1),
        "weights": noise().exp(),
        "entropies": noise().abs(),
        "values": values,
        "old_values": values + spread * noise(),
        "returns": noise(),
    }
    return Step(lengths, fields)


@dataclass
class Term:
    """One token's."""

    loss: float
    slope: float
    metrics: dict[str, float] = field(default_factory=dict)


Token = Mapping[str, float]
Terms = Callable[[list[Token]], list[Term]]
"""From the tokens of one sequence that count to their terms."""


def reference(
    step: Step,
    terms: Terms,
    how: Aggregation,
    scale: float = 1.0,
    *,
    loss_metric: str | None = None,
    weighted: bool = False,
) -> Outcome:
    """What any layout of the step must give."""
    counts = counts_of(step.lengths)
    columns = (field.tolist() for field in step.fields.values())
    rows = iter([dict(zip(step.fields, row, strict=True)) for row in zip(*columns, strict=True)])
    value, slopes, metrics = 0.0, [], {}
    for (length,) in step.lengths:
        tokens = list(islice(rows, length))
        for token, term in zip(tokens, terms(tokens), strict=True):
            share = {
                Aggregation.TOKEN_MEAN: 1 / counts.tokens,
                Aggregation.SEQUENCE_MEAN_TOKEN_MEAN: 1 / length / counts.sequences,
                Aggregation.SEQUENCE_MEAN_TOKEN_SUM: 1 / scale / counts.sequences,
            }[how]
            share *= token["weights"] if weighted else 1
            value += share * term.loss
            slopes.append(share * term.slope)
            for name, number in term.metrics.items():
                if name == "ratio_min":
                    metrics[name] = min(metrics.get(name, 1.0), number)
                elif name == "ratio_max":
                    metrics[name] = max(metrics.get(name, 1.0), number)
                else:
                    metrics[name] = metrics.get(name, 0.0) + number / counts.tokens
    if loss_metric is not None:
        metrics[loss_metric] = value
    exact = partial(torch.tensor, dtype=torch.float64)
    shares = {name: exact(number) for name, number in metrics.items()}
    return Outcome(exact(value), exact(slopes), shares)


def policy_terms(kind: PolicyObjective, low: float, high: float, dual_clip: float | None) -> Terms:
    """With ratios r, the bounds 1 - low and 1 + high, and advantages A."""

    def terms(tokens: list[Token]) -> list[Term]:
        differences = [token["logprobs"] - token["old_logprobs"] for token in tokens]
        result = []
        for token, difference in zip(tokens, differences, strict=True):
            a, logprob = token["advantages"], token["logprobs"]
            r = np.exp(difference)
            if kind is PolicyObjective.GSPO:
                r = np.exp(sum(differences) / len(differences))
            metrics = {
                "approx_kl": np.exp(difference) - 1 - difference,
                "clip_fraction_low": 0.0,
                "clip_fraction_high": 0.0,
                "ratio_min": r,
                "ratio_max": r,
            }
            if kind is PolicyObjective.GRADIENT:
                term = Term(-a * logprob, -a, metrics)
            elif kind is PolicyObjective.CISPO:
                weight = min(max(r, 1 - low), 1 + high)
                metrics["clip_fraction_low"] = float(r < 1 - low)
                metrics["clip_fraction_high"] = float(r > 1 + high)
                term = Term(-weight * a * logprob, -weight * a, metrics)
            else:
                # The derivative of r by the token's log-prob is r.
                term = Term(-a * r, -a * r, metrics)
                if a > 0 and r > 1 + high:
                    term.loss, term.slope = -a * (1 + high), 0.0
                    metrics["clip_fraction_high"] = 1.0
                if a < 0 and r < 1 - low:
                    term.loss, term.slope = -a * (1 - low), 0.0
                    metrics["clip_fraction_low"] = 1.0
                if dual_clip is not None:
                    metrics["clip_fraction_dual"] = 0.0
                    if a < 0 and term.loss > dual_clip * -a:
                        term.loss, term.slope = dual_clip * -a, 0.0
                        metrics["clip_fraction_dual"] = 1.0
            result.append(term)
        return result

    return terms


def kl_terms(estimator: KlEstimator) -> Terms:
    """Of log p - log ref, log p being the policy's."""

    def term(token: Token) -> Term:
        away = token["logprobs"] - token["ref_logprobs"]
        k3, k3_slope = np.exp(-away) - 1 + away, 1 - np.exp(-away)
        if estimator is KlEstimator.K1:
            return Term(away, 1.0)
        if estimator is KlEstimator.K2:
            return Term(away**2 / 2, away)
        if estimator is KlEstimator.K3:
            return Term(k3, k3_slope)
        r = np.exp(token["logprobs"] - token["old_logprobs"])
        return Term(r * k3, r * k3 + r * k3_slope)

    return lambda tokens: [term(token) for token in tokens]


def entropy_terms(tokens: list[Token]) -> list[Term]:
    return [Term(-token["entropies"], -1.0, {"entropy": token["entropies"]}) for token in tokens]


def value_terms(clip: float | None) -> Terms:
    """Half the squared error of v, or of v held within `clip` of the old if that is worse."""

    def term(token: Token) -> Term:
        v, old, target = token["values"], token["old_values"], token["returns"]
        plain = Term((v - target) ** 2 / 2, v - target, {"value_clip_fraction": 0.0})
        if clip is None or abs(v - old) <= clip:
            return plain
        held = old + clip if v > old else old - clip
        error = (held - target) ** 2 / 2
        return Term(error, 0.0, {"value_clip_fraction": 1.0}) if error > plain.loss else plain

    return lambda tokens: [term(token) for token in tokens]
