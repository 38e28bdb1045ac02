"""Which pictures the report shows: the held-out metrics over the family tree of policies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.contracts.params import Params
from stages.reporting.chart import Line, Point, draw
from stages.reporting.evidence import Evidence
from stages.reporting.family import Family
from stages.reporting.markup import Markup, element
from stages.reporting.scale import Axis, Tick, fit
from stages.reporting.vocabulary import EVALUATION, Form, describe, write

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


def figures(family: Family, evidence: Evidence, params: Params) -> list[Figure]:
    """Accuracy, reward, KL, entropy and length over the iterations; and reward against KL.

    Where nothing says what is right, the win rate stands in for accuracy.
    """
    steps = iteration_axis(family)
    share = Form.SHARE
    max_kl = params.policy_update.max_kl
    kl_warning = "" if params.warn.kl is None else f"; a warning past {params.warn.kl:g}"

    def over_iterations(
        metric: str, reading: str, *, spread: str = "", floor: float | None = 0.0
    ) -> Figure:
        lines = _lines(family, evidence, metric, family.depth, spread=spread)
        title = EVALUATION[metric].label
        y = fit(_extremes(lines), floor=floor)
        key = (("band", "± one standard deviation"),) if spread else ()
        form = EVALUATION[metric].format
        svg = draw(metric, f"{title} over the iterations", lines, steps, y, form)
        return Figure(title, reading, key, svg)

    def as_share(metric: str, reading: str) -> Figure:
        greedy = _lines(family, evidence, metric, family.depth, name="greedy")
        sampled = _lines(
            family, evidence, f"{metric}_sampled", family.depth, name="sampled", dashed=True
        )
        title = EVALUATION[metric].label
        y = fit(_extremes([*greedy, *sampled]), share, floor=0.0, ceiling=1.0)
        svg = draw(metric, f"{title} over the iterations", [*greedy, *sampled], steps, y, share)
        return Figure(title, reading, (("solid", "greedy"), ("dashed", "sampled")), svg)

    is_judged = any("accuracy" in metrics for metrics in evidence.evaluations.values())
    return [
        as_share("accuracy", "Held-out answers that are exactly right. Higher is better.")
        if is_judged
        else as_share("win_rate", "Against the SFT policy, by reward. 50% is no difference."),
        over_iterations(
            "reward_mean",
            "What training pushes up. Should rise with accuracy.",
            spread="reward_std",
            floor=None,
        ),
        over_iterations(
            "kl_to_reference",
            f"Nats per token from the SFT policy. Updates stop past {max_kl:g}{kl_warning}.",
        ),
        over_iterations("entropy", "Nats per token. Falls as the policy decides; 0 is collapse."),
        over_iterations("response_length", "Mean tokens in a response."),
        _reward_against_kl(family, evidence),
    ]


def training_figures(family: Family, evidence: Evidence) -> list[Figure]:
    """What the stages that made each policy measured, where they did."""
    numbers = {
        policy: {name: value for stage in stages.values() for name, value in stage.items()}
        for policy, stages in evidence.training.items()
    }
    inside = replace(evidence, evaluations={p: numbers.get(p, {}) for p in family.policies})
    steps = iteration_axis(family)
    figures = []
    for name in _IN_TRAINING:
        metric = describe(name)
        lines = _lines(family, inside, name, family.depth)
        if lines:
            floor = None if name == "reward_mean" else 0.0
            y = fit(_extremes(lines), metric.format, floor=floor)
            svg = draw(
                f"training-{name}", f"{metric.label} in training", lines, steps, y, metric.format
            )
            figures.append(Figure(metric.label, metric.meaning, (), svg))
    return figures


def iteration_axis(family: Family) -> Axis:
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


def _reward_against_kl(family: Family, evidence: Evidence) -> Figure:
    lines = _lines(
        family,
        evidence,
        "reward_mean",
        lambda policy: evidence.evaluations[policy]["kl_to_reference"],
        numeric_x=True,
    )
    distances = [point.x for line in lines for point in line.points]
    x = fit(distances, floor=0.0, title="KL to the reference")
    # Room for the label of the SFT policy, whose KL is 0.
    x = replace(x, low=x.low - 0.06 * (x.high - x.low))
    y = fit(_extremes(lines))
    return Figure(
        "Reward for its KL",
        "How much reward each step away from SFT bought. Steep is good.",
        (),
        draw("reward-kl", "Reward against KL to the reference", lines, x, y, Form.NUMBER),
    )


def _lines(
    family: Family,
    evidence: Evidence,
    metric: str,
    place: Callable[[str], float],
    *,
    name: str = "",
    dashed: bool = False,
    spread: str = "",
    numeric_x: bool = False,
) -> list[Line]:
    branches = family.branches()
    lines = []
    for index, branch in enumerate(branches):
        points = []
        for policy in branch.policies:
            metrics = evidence.evaluations[policy]
            value, x = metrics.get(metric), place(policy)
            # Bands of several branches would hide one another, so only the final one has it.
            half = metrics.get(spread, 0.0) if index == 0 else 0.0
            if value is None or not (math.isfinite(value) and math.isfinite(x)):
                continue
            text = (
                f"{policy}: reward {write(value)} at KL {write(x, Form.NATS)}" if numeric_x else ""
            )
            points.append(Point(policy, x, value, half if math.isfinite(half) else 0.0, text))
        label = " ".join(filter(None, (branch.leaf if len(branches) > 1 else "", name)))
        label = label or describe(metric).label
        lines.append(Line(tuple(points), index % NUM_COLOURS, label, dashed, forks=index > 0))
    return [line for line in lines if line.own_points]


def _extremes(lines: Sequence[Line]) -> list[float]:
    points = [point for line in lines for point in line.points]
    return [point.y + sign * point.spread for point in points for sign in (-1, 1)]
