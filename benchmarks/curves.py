"""Small charts of what a stage logged at its steps, as one SVG picture."""

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, EDGE = 270, 174, 48


def drawn(runs: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """A picture with a small chart for each curve, over the steps: a line for each run."""
    charts = [_chart(name, [run[name] for run in runs], at) for at, name in enumerate(runs[0])]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}"'
    style = (
        "<style>text{font:11px sans-serif;fill:#666}path{fill:none;stroke:#27c;stroke-width:1.5}"
    )
    style += "line{stroke:#ccc}</style>"
    body = "\n".join(charts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{style}\n{body}\n</svg>\n'


def _chart(name: str, lines: Sequence[Sequence[float]], at: int) -> str:
    low, high = min(map(min, lines)), max(map(max, lines))
    spread, steps = (high - low) or 1.0, max(map(len, lines))
    right, bottom = WIDTH - 12, HEIGHT - EDGE

    def path(values: Sequence[float]) -> str:
        places = [
            (
                EDGE + (right - EDGE) * i / max(1, steps - 1),
                bottom - (bottom - EDGE) * (value - low) / spread,
            )
            for i, value in enumerate(values)
        ]
        return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)

    return "\n".join(
        [
            f'<g transform="translate({WIDTH * at} 0)">',
            f'<text x="{EDGE}" y="18">{name}</text>',
            f'<line x1="{EDGE}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
            f'<line x1="{EDGE}" y1="{EDGE}" x2="{EDGE}" y2="{bottom}"/>',
            f'<text x="2" y="{EDGE + 4}">{high:.3g}</text>',
            f'<text x="2" y="{bottom}">{low:.3g}</text>',
            f'<text x="{EDGE}" y="{bottom + 16}">step 1</text>',
            f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{steps}</text>',
            *(f'<path d="{path(values)}"/>' for values in lines),
            "</g>",
        ]
    )
