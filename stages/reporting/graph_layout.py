"""Where each stage of the graph goes on the page.

Stages of one iteration form a band, read from left to right; bands lie below one another, what
comes before the loop first and what comes after it last. An arrow that a longer way already implies
is left out: `score` needs the policy, but it also needs the rollouts, which need the policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

NODE_WIDTH = 226
COLUMN_GAP = 42
BAND_GAP = 34
STACK_GAP = 12
HEADER, ROW, FOOTER = 26, 16, 8
FIRST_LANE, LANE = 10, 6


@dataclass(frozen=True)
class Node:
    """A stage as a box."""

    name: str
    deps: tuple[str, ...]
    outs: tuple[tuple[str, str], ...]
    """Path and hash of each output."""
    x: float
    y: float

    @property
    def height(self) -> float:
        return HEADER + ROW * len(self.outs) + FOOTER


@dataclass(frozen=True)
class Arrow:
    source: str
    target: str
    corners: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    width: float
    height: float


def arrange(graph: Sequence[Mapping[str, Any]], iterations: Sequence[str]) -> Layout:
    """Boxes and arrows for the nodes of the report's context; bands follow `iterations`."""
    outs = {node["stage"]: tuple(sorted(node["outs"].items())) for node in graph}
    deps = {node["stage"]: sorted(set(node["deps"]) & set(outs)) for node in graph}
    deps = {name: deps[name] for name in sorted(deps)}
    order = list(TopologicalSorter(deps).static_order())
    ancestors: dict[str, set[str]] = {}
    for name in order:
        ancestors[name] = set(deps[name]).union(*(ancestors[dep] for dep in deps[name]))
    needed = {
        name: [dep for dep in own if not any(dep in ancestors[other] for other in own)]
        for name, own in deps.items()
    }
    bands = _bands(order, ancestors, iterations)
    nodes = _place(bands, order, needed, deps, outs)
    arrows = _route(nodes, needed, bands)
    return Layout(
        nodes=tuple(nodes.values()),
        arrows=tuple(arrows),
        width=max((corner[0] for arrow in arrows for corner in arrow.corners), default=0.0),
        height=max((node.y + node.height for node in nodes.values()), default=0.0),
    )


def _bands(
    order: Sequence[str], ancestors: Mapping[str, set[str]], iterations: Sequence[str]
) -> dict[str, int]:
    """The band of each stage, counted from the top."""
    places: dict[str, int] = {}
    for name in order:
        key = name.partition("@")[2]
        after_loop = any("@" in ancestor for ancestor in ancestors[name])
        if key:
            places[name] = 1 + iterations.index(key)
        else:
            places[name] = 1 + len(iterations) if after_loop else 0
    ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
    return {name: ranks[place] for name, place in places.items()}


def _place(
    bands: Mapping[str, int],
    order: Sequence[str],
    needed: Mapping[str, list[str]],
    deps: Mapping[str, list[str]],
    outs: Mapping[str, tuple[tuple[str, str], ...]],
) -> dict[str, Node]:
    column: dict[str, int] = {}
    for name in order:
        inside = [column[dep] for dep in needed[name] if bands[dep] == bands[name]]
        column[name] = 1 + max(inside, default=-1)
    nodes: dict[str, Node] = {}
    top = 0.0
    for band in range(max(bands.values(), default=-1) + 1):
        bottoms: dict[int, float] = {}
        for name in (name for name in order if bands[name] == band):
            y = bottoms.get(column[name], top - STACK_GAP) + STACK_GAP
            x = column[name] * (NODE_WIDTH + COLUMN_GAP)
            nodes[name] = Node(name, tuple(deps[name]), outs[name], x, y)
            bottoms[column[name]] = y + nodes[name].height
        top = max(bottoms.values()) + BAND_GAP
    return nodes


def _route(
    nodes: Mapping[str, Node], needed: Mapping[str, list[str]], bands: Mapping[str, int]
) -> list[Arrow]:
    """Arrows leave a box on its right. One to another band runs down between the columns and enters
    its target from above. Arrows to the same target share their lanes; others do not touch."""
    tops: dict[int, float] = {}
    for name, node in nodes.items():
        tops[bands[name]] = min(tops.get(bands[name], node.y), node.y)
    down_lanes: dict[float, list[_Run]] = {}
    across_lanes: dict[float, list[_Run]] = {}
    arrows = []
    for target, sources in needed.items():
        end, band = nodes[target], bands[target]
        for start in (nodes[source] for source in sources):
            right, level = start.x + NODE_WIDTH, start.y + HEADER / 2
            if bands[start.name] == band:
                middle, entry = end.x - FIRST_LANE - 2, end.y + HEADER / 2
                corners = [(right, level), (middle, level), (middle, entry), (end.x, entry)]
            else:
                centre, top = end.x + NODE_WIDTH / 2, tops[band]
                down = right + _lane(down_lanes.setdefault(right, []), target, level, top)
                left, far = min(centre, down), max(centre, down)
                across = top - _lane(across_lanes.setdefault(top, []), target, left, far)
                corners = [(right, level), (down, level), (down, across), (centre, across)]
                corners.append((centre, end.y))
            arrows.append(Arrow(start.name, target, tuple(corners)))
    return arrows


@dataclass(frozen=True)
class _Run:
    """A piece of a lane that arrows to one target occupy."""

    lane: int
    target: str
    start: float
    end: float


def _lane(runs: list[_Run], target: str, start: float, end: float) -> float:
    """The distance of the first lane that no arrow to another target occupies between the two."""
    busy = {
        run.lane for run in runs if run.target != target and run.start <= end and start <= run.end
    }
    lane = next(number for number in range(len(runs) + 1) if number not in busy)
    runs.append(_Run(lane, target, start, end))
    return FIRST_LANE + LANE * lane
