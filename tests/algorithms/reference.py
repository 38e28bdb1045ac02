"""Every loss once more, in plain loops over float64 numbers, from the papers' formulas.

A term is a token's loss, its derivative by the token's own log-prob (or value), and what the token
adds to each metric. `reference` puts terms together sequence by sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stages.contracts.objectives import Aggregation, KlEstimator, PolicyObjective
from tests.algorithms.ragged import Outcome, Step


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
    num_tokens = sum(sum(mask) for mask in step.masks)
    num_sequences = sum(1 for mask in step.masks if sum(mask) > 0)
    value, gradient, metrics = 0.0, [], {}
    for sequence, mask in enumerate(step.masks):
        slopes = [0.0] * len(mask)
        places = [t for t in range(len(mask)) if mask[t]]
        tokens = [
            {name: column[sequence][t] for name, column in step.numbers.items()} for t in places
        ]
        for t, token, term in zip(places, tokens, terms(tokens), strict=True):
            if how is Aggregation.TOKEN_MEAN:
                share = 1 / num_tokens
            elif how is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
                share = 1 / len(tokens) / num_sequences
            else:
                share = 1 / scale / num_sequences
            share *= token["weights"] if weighted else 1
            value += share * term.loss
            slopes[t] = share * term.slope
            for name, number in term.metrics.items():
                if name == "ratio_min":
                    metrics[name] = min(metrics.get(name, 1.0), number)
                elif name == "ratio_max":
                    metrics[name] = max(metrics.get(name, 1.0), number)
                else:
                    metrics[name] = metrics.get(name, 0.0) + number / num_tokens
        gradient.append(slopes)
    if loss_metric is not None:
        metrics[loss_metric] = value
    return Outcome(value, gradient, metrics)


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
