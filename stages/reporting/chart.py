"""A line chart as inline SVG: gridlines, axes, labelled values, and every value on hover.

Colours come from the page's style sheet through classes (`b0`, `b1`, ... for the branches), so a
chart follows the light or dark page around it. Labels that would overlap are left out; the hover
text, the description for screen readers and the table below the charts still have the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.reporting.markup import Markup, element, join
from stages.reporting.scale import Axis
from stages.reporting.vocabulary import Form, write

WIDTH, HEIGHT = 360, 226
LEFT, RIGHT, TOP, BOTTOM = 46, 342, 18, 190
_LABEL_HEIGHT = 12
_CHARACTER_WIDTH = 6.6
_MOST_LABELS = 6


@dataclass(frozen=True)
class Point:
    policy: str
    x: float
    y: float
    spread: float = 0.0
    """Half the height of the band around the value."""
    text: str = ""
    """What is shown on hover; the value alone if empty."""


@dataclass(frozen=True)
class Line:
    points: tuple[Point, ...]
    branch: int
    """Which colour."""
    name: str
    dashed: bool = False
    forks: bool = False
    """Whether its first point belongs to another line, which marks and labels it."""

    @property
    def own_points(self) -> tuple[Point, ...]:
        return self.points[1:] if self.forks else self.points


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def draw(slug: str, title: str, lines: Sequence[Line], x: Axis, y: Axis, form: Form) -> Markup:
    """The chart; the first line is drawn last, on top of the others."""
    back_to_front = list(reversed(lines))
    return element(
        "svg",
        element("title", title, id=f"{slug}-title"),
        element("desc", _describe(lines, form), id=f"{slug}-desc"),
        _grid(x, y),
        [_band(line, x, y) for line in back_to_front],
        [_path(line, x, y) for line in back_to_front],
        [_dots(line, x, y, form) for line in back_to_front],
        _labels(lines, x, y, form),
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{slug}-title {slug}-desc",
    )


def _describe(lines: Sequence[Line], form: Form) -> str:
    return " ".join(
        f"{line.name}: "
        + ", ".join(f"{point.policy} {write(point.y, form)}" for point in line.own_points)
        + "."
        for line in lines
    )


def _grid(x: Axis, y: Axis) -> Markup:
    horizontal = []
    for tick in y.ticks:
        level = y.place(tick.value, BOTTOM, TOP)
        kind = "axis" if tick is y.ticks[0] else "grid"
        horizontal += [
            element("line", x1=LEFT, x2=RIGHT, y1=level, y2=level, class_=kind),
            element("text", tick.label, x=LEFT - 8, y=level + 3.5, class_="tick end"),
        ]
    vertical = []
    for tick in x.ticks:
        place = x.place(tick.value, LEFT, RIGHT)
        vertical += [
            element("line", x1=place, x2=place, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"),
            element("text", tick.label, x=place, y=BOTTOM + 17, class_="tick middle"),
        ]
    caption = (
        element("text", x.title, x=RIGHT, y=HEIGHT - 4, class_="tick end") if x.title else None
    )
    return join(horizontal, vertical, caption)


def _band(line: Line, x: Axis, y: Axis) -> Markup | None:
    if not any(point.spread for point in line.points):
        return None
    upper = [_pixel(point.x, point.y + point.spread, x, y) for point in line.points]
    lower = [_pixel(point.x, point.y - point.spread, x, y) for point in reversed(line.points)]
    return element("polygon", points=_coordinates(upper + lower), class_=f"band b{line.branch}")


def _path(line: Line, x: Axis, y: Axis) -> Markup:
    places = [_pixel(point.x, point.y, x, y) for point in line.points]
    dashed = " dashed" if line.dashed else ""
    return element("polyline", points=_coordinates(places), class_=f"line b{line.branch}{dashed}")


def _dots(line: Line, x: Axis, y: Axis, form: Form) -> Markup:
    hollow = " hollow" if line.dashed else ""
    dots = []
    for point in line.own_points:
        across, down = _pixel(point.x, point.y, x, y)
        text = point.text or f"{point.policy}, {line.name}: {write(point.y, form)}"
        dots.append(
            element(
                "circle",
                element("title", text),
                cx=across,
                cy=down,
                r=2.75 if line.dashed else 3.5,
                class_=f"dot b{line.branch}{hollow}",
            )
        )
    return join(dots)


def _labels(lines: Sequence[Line], x: Axis, y: Axis, form: Form) -> Markup:
    """Values beside their points. The ends of a line matter most; a long one has no others."""
    dots = [_pixel(point.x, point.y, x, y) for line in lines for point in line.points]
    taken = [_Box(px - 4, py - 4, px + 4, py + 4) for px, py in dots]
    labels = []
    for line in lines:
        points = list(line.own_points)
        between = points if len(points) <= _MOST_LABELS else []
        for point in dict.fromkeys([*points[-1:], *points[:1], *between]):
            text = write(point.y, form)
            half = len(text) * _CHARACTER_WIDTH / 2
            across, down = _pixel(point.x, point.y, x, y)
            centre = min(max(across, LEFT + half + 2), WIDTH - half - 2)
            above, below = down - 8, down + 8 + _LABEL_HEIGHT - 3
            for base in (below, above) if line.dashed else (above, below):
                box = _Box(centre - half, base - _LABEL_HEIGHT + 3, centre + half, base + 2)
                inside = box.top >= 0 and box.bottom <= BOTTOM
                if inside and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    kind = f"value middle b{line.branch}"
                    labels.append(element("text", text, x=centre, y=base, class_=kind))
                    break
    return join(labels)


def _pixel(x_value: float, y_value: float, x: Axis, y: Axis) -> tuple[float, float]:
    return x.place(x_value, LEFT, RIGHT), y.place(y_value, BOTTOM, TOP)


def _coordinates(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
