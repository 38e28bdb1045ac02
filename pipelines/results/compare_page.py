"""A comparison as one HTML page for a review: the report's style and charts, everything escaped."""

from pathlib import Path

from pipelines.lineage.facts import value_text
from pipelines.lineage.stage_run import short_hash
from pipelines.results.compare import Comparison, Curve
from pipelines.results.compare_text import cell, pair_numbers, told
from stages.reporting import chart
from stages.reporting.charts import Figure, swatch
from stages.reporting.scale import Axis, Tick, fit
from stages.reporting.tables import Cell, Group, Row, Table, shorten
from stages.reporting.templates import render
from stages.reporting.vocabulary import describe, write

PAGES = Path(__file__).parent / "pages"
_MOST_TICKS = 8


def compare_page(comparison: Comparison, limit: int | None) -> str:
    """The whole document; of each pair no more than `limit` samples."""
    names = [side.name for side in comparison.sides]
    return render(
        "compare.html.j2",
        PAGES,
        title=" · ".join(names),
        notes=comparison.notes,
        sides=_table(
            ["Name", "Policy", "Of", "Trained through", "Answers"],
            [
                Row(side.name, [*map(Cell, (*told(side)[1:], short_hash(side.evaluation)))])
                for side in comparison.sides
            ],
        ),
        params=_table(
            ["Param", *names],
            [
                Row(c.key, [Cell(value_text(value)) for value in c.values])
                for c in comparison.params
            ],
        ),
        metrics=_table(
            ["Metric", *names],
            [
                Row(row.label, [Cell(cell(row.name, v)) for v in row.values], _meaning(row.name))
                for row in comparison.metrics
            ],
        ),
        figures=[_figure(curve, names) for curve in comparison.curves],
        pairs=[
            {
                "old": names[pair.old],
                "new": names[pair.new],
                "facts": pair,
                "numbers": [row for row in pair_numbers(pair) if row[1]],
                "shown": pair.changed[:limit],
                "left": len(pair.changed) - len(pair.changed[:limit]),
            }
            for pair in comparison.pairs
        ],
        names=names,
        swatch=swatch,
        shorten=shorten,
        write=write,
    )


def _table(head: list[str], rows: list[Row]) -> Table:
    return Table(head, [Group(rows)])


def _meaning(name: str) -> str:
    return describe(name).meaning


def _figure(curve: Curve, names: list[str]) -> Figure:
    """The curves of all sides in one chart."""
    metric = describe(curve.name)
    lines = [
        chart.Line(
            tuple(
                chart.Point(
                    point.policy,
                    point.step,
                    point.at.value,
                    point.at.error or 0.0,
                    f"{names[index]}, {point.policy}: {cell(curve.name, point.at)}",
                )
                for point in line
            ),
            index,
            names[index],
        )
        for index, line in enumerate(curve.lines)
        if line
    ]
    values = [p.y + sign * p.spread for line in lines for p in line.points for sign in (-1, 1)]
    deepest = max(int(point.x) for line in lines for point in line.points)
    stride = max(1, -(-deepest // _MOST_TICKS))
    ticks = tuple(Tick(s, str(s) if s else "sft") for s in range(0, deepest + 1, stride))
    x = Axis(-0.12, deepest + 0.12, ticks, "iterations after SFT")
    y = fit(values, metric.format, None if curve.name == "reward_mean" else 0.0)
    svg = chart.draw(
        f"compare-{curve.name}", f"{metric.label} over the iterations", lines, x, y, metric.format
    )
    return Figure(metric.label, metric.meaning, (), svg)
