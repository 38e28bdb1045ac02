"""The graph as inline SVG: a box for each stage, short hashes of its outputs, whole on hover."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from stages.reporting.family import ROOT, Family
from stages.reporting.graph_layout import HEADER, NODE_WIDTH, ROW, Arrow, Node, arrange
from stages.reporting.markup import Markup, element

SHORT = 7
_MOST_CHARACTERS = 21
_PADDING = 12
_CORNER = 6


def draw(graph: Sequence[Mapping[str, Any]], family: Family) -> Markup:
    """The whole upstream graph; the stage that made the final policy stands out."""
    layout = arrange(graph, list(family.parents))
    width = max(layout.width, *(node.x + NODE_WIDTH for node in layout.nodes)) + 4
    stages = ", ".join(node.name for node in layout.nodes)
    head = element("path", d="M0 0L7 3.5L0 7z", class_="arrowhead")
    marker = element(
        "marker", head, id="arrow", viewBox="0 0 7 7", refX=7, refY=3.5, markerWidth=7,
        markerHeight=7, orient="auto",
    )  # fmt: skip
    return element(
        "svg",
        element("title", "The graph of stages with the hashes of their outputs", id="graph-title"),
        element("desc", f"Stages from first to last: {stages}.", id="graph-desc"),
        element("defs", marker),
        [_arrow(arrow) for arrow in layout.arrows],
        [_node(node, family.final) for node in layout.nodes],
        class_="graph",
        viewBox=f"-2 -2 {width + 2:.0f} {layout.height + 4:.0f}",
        role="img",
        aria_labelledby="graph-title graph-desc",
    )


def output_name(path: str, key: str) -> str:
    """An output inside its box: the last part of its path that the box does not say already."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] == "metrics":
        return "metrics"
    telling = [part for part in parts if part not in (key, ROOT)] or list(parts)
    name = telling[-1]
    return name if len(name) <= _MOST_CHARACTERS else name[: _MOST_CHARACTERS - 1] + "…"


def _arrow(arrow: Arrow) -> Markup:
    return element(
        "path",
        element("title", f"{arrow.target} needs {arrow.source}"),
        d=_rounded(arrow.corners),
        class_="arrow",
        marker_end="url(#arrow)",
    )


def _rounded(corners: Sequence[tuple[float, float]]) -> str:
    """A path through the corners, each cut by a small curve."""
    points = [point for i, point in enumerate(corners) if i == 0 or point != corners[i - 1]]
    steps = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        start, end = _towards(corner, before), _towards(corner, after)
        steps.append(f"L{start[0]:.1f} {start[1]:.1f}")
        steps.append(f"Q{corner[0]:.1f} {corner[1]:.1f} {end[0]:.1f} {end[1]:.1f}")
    steps.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(steps)


def _towards(corner: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    across, down = other[0] - corner[0], other[1] - corner[1]
    reach = min(_CORNER, (abs(across) + abs(down)) / 2)
    length = (abs(across) + abs(down)) or 1.0
    return corner[0] + across / length * reach, corner[1] + down / length * reach


def _node(node: Node, final: str) -> Markup:
    stage, _, key = node.name.partition("@")
    chosen = " chosen" if node.name == f"policy_update@{final}" else ""
    rows = []
    for index, (path, digest) in enumerate(node.outs):
        y = node.y + HEADER + ROW * index + 10
        rows.append(
            element(
                "g",
                element("title", f"{path}\n{digest or 'no hash'}"),
                element("text", output_name(path, key), x=node.x + _PADDING, y=y, class_="out"),
                element(
                    "text",
                    (digest or "–")[:SHORT],
                    x=node.x + NODE_WIDTH - _PADDING,
                    y=y,
                    class_="hash end",
                ),
            )
        )
    name = element(
        "text",
        element("title", f"{node.name} needs {', '.join(node.deps) or 'no other stage'}"),
        element("tspan", stage, class_="stage"),
        element("tspan", f" {key}", class_="key") if key else None,
        x=node.x + _PADDING,
        y=node.y + 18,
    )
    box = element(
        "rect", x=node.x, y=node.y, width=NODE_WIDTH, height=node.height, rx=6, class_="box"
    )
    return element("g", box, name, rows, class_=f"node{chosen}")
