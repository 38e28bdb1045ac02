"""Which pictures the report shows: the held-out metrics over the family tree of policies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stages.contracts.params import Params
from stages.reporting.chart import Line, Point, draw
from stages.reporting.evidence import Evidence, Metrics
from stages.reporting.family import Family
from stages.reporting.markup import Markup, element
from stages.reporting.scale import Axis, Tick, fit
from stages.reporting.vocabulary import Form, describe, write

NUM_COLOURS = 6
_MOST_TICKS = 8
_IN_TRAINING = (
    "reward_mean",
    "approx_kl",
    "zero_variance_share",
    "explained_variance",
    "grad_norm",
)
"""Of the stages' own numbers, those that are drawn."""


@dataclass(frozen=True)
class Figure:
    """A chart with its heading and the sentence that says how to read it."""

    title: str
    reading: str
    key: tuple[tuple[str, str], ...]
    """Line style and what it stands for."""
    svg: Markup


@dataclass(frozen=True)
class _Curve:
    """One metric of every policy; each branch of the family has a line of it."""

    metric: str
    numbers: Mapping[str, Metrics]
    """Those of each policy."""
    name: str = ""
    """What tells it from another curve in the same chart."""
    dashed: bool = False
    spread: str = ""
    """The metric that is half the height of the band around it."""
    against: str = ""
    """The metric that it is drawn over; empty: the iterations."""


def figures(family: Family, evidence: Evidence, params: Params) -> list[Figure]:
    """Accuracy, reward, KL, entropy and length over the iterations; and reward against KL.

    Where nothing says what is right, the win rate stands in for accuracy.
    """
    numbers = evidence.evaluations
    max_kl = params.policy_update.max_kl
    kl_warning = "" if params.warn.kl is None else f"; a warning past {params.warn.kl:g}"

    def one(metric: str, reading: str) -> Figure:
        svg = _over_iterations(family, [_Curve(metric, numbers)], metric)
        return Figure(describe(metric).label, reading, (), svg)

    def as_share(metric: str, reading: str) -> Figure:
        greedy = _Curve(metric, numbers, "greedy")
        sampled = _Curve(f"{metric}_sampled", numbers, "sampled", dashed=True)
        svg = _over_iterations(family, [greedy, sampled], metric)
        key = (("solid", "greedy"), ("dashed", "sampled"))
        return Figure(describe(metric).label, reading, key, svg)

    is_judged = any("accuracy" in metrics for metrics in numbers.values())
    reward = _Curve("reward_mean", numbers, spread="reward_std")
    return [
        as_share("accuracy", "Held-out answers that are exactly right. Higher is better.")
        if is_judged
        else as_share("win_rate", "Against the SFT policy, by reward. 50% is no difference."),
        Figure(
            describe("reward_mean").label,
            "What training pushes up. Should rise with accuracy.",
            (("band", "± one standard deviation"),),
            _over_iterations(family, [reward], "reward_mean"),
        ),
        one(
            "kl_to_reference",
            f"Nats per token from the SFT policy. Updates stop past {max_kl:g}{kl_warning}.",
        ),
        one("entropy", "Nats per token. Falls as the policy decides; 0 is collapse."),
        one("response_length", "Mean tokens in a response."),
        _reward_against_kl(family, evidence),
    ]


def training_figures(family: Family, evidence: Evidence) -> list[Figure]:
    """What the stages that made each policy measured, where they did."""
    numbers: dict[str, Metrics] = {
        policy: {
            name: value
            for stage in evidence.training.get(policy, {}).values()
            for name, value in stage.items()
        }
        for policy in family.policies
    }
    figures = []
    for name in _IN_TRAINING:
        curve, metric = _Curve(name, numbers), describe(name)
        if _lines(family, curve):
            svg = _over_iterations(family, [curve], f"training-{name}", "in training")
            figures.append(Figure(metric.label, metric.meaning, (), svg))
    return figures


def _iteration_axis(family: Family) -> Axis:
    """Depth in the tree. Policies give the ticks their names where each depth has just one."""
    deepest = max(family.depth(policy) for policy in family.policies)
    named = len(family.policies) == deepest + 1 and deepest <= 4
    if named and max(map(len, family.policies)) <= 9:
        ticks = tuple(Tick(family.depth(policy), policy) for policy in family.policies)
        title = ""
    else:
        stride = math.ceil(deepest / _MOST_TICKS)
        depths = range(0, deepest + 1, stride)
        ticks = tuple(Tick(depth, str(depth) if depth else "sft") for depth in depths)
        title = "iterations after SFT"
    return Axis(-0.12, deepest + 0.12, ticks, title)


def legend(family: Family) -> list[str]:
    """Names the branches, where there is more than one."""
    final, *others = family.branches()
    names = [f"{branch.leaf}, from {branch.policies[0]}" for branch in others]
    return [f"{final.leaf}, final", *names] if others else []


def swatch(style: str, branch: int = 0) -> Markup:
    """A short piece of a line, or of a band, for a legend."""
    branch %= NUM_COLOURS
    if style == "band":
        piece = element("rect", x=0, y=1, width=22, height=8, class_=f"band b{branch}")
    else:
        dashed = " dashed" if style == "dashed" else ""
        piece = element("line", x1=1, x2=21, y1=5, y2=5, class_=f"line b{branch}{dashed}")
    return element("svg", piece, class_="swatch", viewBox="0 0 22 10", aria_hidden="true")


def _over_iterations(
    family: Family, curves: Sequence[_Curve], slug: str, where: str = "over the iterations"
) -> Markup:
    """A chart with 0 on its vertical axis, but for rewards, whose zero means nothing."""
    metric = describe(curves[0].metric)
    lines = [line for curve in curves for line in _lines(family, curve)]
    floor = None if curves[0].metric == "reward_mean" else 0.0
    y = fit(_extremes(lines), metric.format, floor)
    title = f"{metric.label} {where}"
    return draw(slug, title, lines, _iteration_axis(family), y, metric.format)


def _reward_against_kl(family: Family, evidence: Evidence) -> Figure:
    lines = _lines(family, _Curve("reward_mean", evidence.evaluations, against="kl_to_reference"))
    distances = [point.x for line in lines for point in line.points]
    x = fit(distances, floor=0.0, title="KL to the reference")
    # Room for the label of the SFT policy, whose KL is 0.
    x = replace(x, low=x.low - 0.06 * (x.high - x.low))
    return Figure(
        "Reward for its KL",
        "How much reward each step away from SFT bought. Steep is good.",
        (),
        draw(
            "reward-kl",
            "Reward against KL to the reference",
            lines,
            x,
            fit(_extremes(lines)),
            Form.NUMBER,
        ),
    )


def _lines(family: Family, curve: _Curve) -> list[Line]:
    branches = family.branches()
    lines = []
    for index, branch in enumerate(branches):
        points = []
        for policy in branch.policies:
            metrics = curve.numbers[policy]
            value = metrics.get(curve.metric)
            x = metrics[curve.against] if curve.against else family.depth(policy)
            # Bands of several branches would hide one another, so only the final one has it.
            half = metrics.get(curve.spread, 0.0) if index == 0 else 0.0
            if value is None or not (math.isfinite(value) and math.isfinite(x)):
                continue
            at_kl = f"{policy}: reward {write(value)} at KL {write(x, Form.NATS)}"
            text = at_kl if curve.against else ""
            points.append(Point(policy, x, value, half if math.isfinite(half) else 0.0, text))
        label = " ".join(filter(None, (branch.leaf if len(branches) > 1 else "", curve.name)))
        label = label or describe(curve.metric).label
        lines.append(Line(tuple(points), index % NUM_COLOURS, label, curve.dashed, index > 0))
    return [line for line in lines if line.own_points]


def _extremes(lines: Sequence[Line]) -> list[float]:
    points = [point for line in lines for point in line.points]
    return [point.y + sign * point.spread for point in points for sign in (-1, 1)]
