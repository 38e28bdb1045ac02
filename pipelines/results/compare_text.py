"""A comparison for a terminal: tables that fit 100 columns where names and numbers let them."""

import shutil
from collections.abc import Sequence

from pipelines.lineage.facts import value_text
from pipelines.lineage.run_index import WORKSPACE
from pipelines.results.changed_sides import ChangedSample, Pair, Response
from pipelines.results.compare import Comparison, Curve, SideFacts, Value
from stages.reporting.markup import printable
from stages.reporting.vocabulary import (
    MISSING,
    Form,
    describe,
    write,
    write_change,
    write_error,
    write_interval,
)

_BARS = "▁▂▃▄▅▆▇█"
_LONGEST = 40
"""Characters of a param's value; the JSON and the page have all of it."""
_MARKS = {True: "✓", False: "✗", None: " "}


def render(comparison: Comparison, limit: int | None) -> str:
    """Params, metrics, curves, wins and samples; of each pair no more than `limit` samples."""
    names = [side.name for side in comparison.sides]
    blocks = [
        _table(
            [("", "policy", "of", "through"), *(told(side) for side in comparison.sides)],
            right=False,
        ),
        _params(comparison, names),
        _metrics(comparison, names),
        *(_curve(curve, names) for curve in comparison.curves),
        *(_pair(pair, names, limit) for pair in comparison.pairs),
    ]
    return "\n\n".join(filter(None, blocks))


def told(side: SideFacts) -> tuple[str, str, str, str]:
    """Its name, its policy, where that is recorded, and the policies it was trained through."""
    revision = side.revision if side.revision == WORKSPACE else side.revision[:7]
    return side.name, side.policy, revision, " → ".join(side.path)


def _params(comparison: Comparison, names: Sequence[str]) -> str:
    if not comparison.params:
        return "params: none differ"
    rows = [
        (change.key, *(_short(value_text(value)) for value in change.values))
        for change in comparison.params
    ]
    return _table([("params that differ", *names), *rows], right=False)


def _metrics(comparison: Comparison, names: Sequence[str]) -> str:
    if not comparison.metrics:
        return ""
    rows = [
        (printable(row.label), *(cell(row.name, v) for v in row.values))
        for row in comparison.metrics
    ]
    note = "in brackets, 95% intervals; ±, one standard error over prompts"
    return _table([("metrics", *names), *rows]) + f"\n{note}"


def cell(name: str, value: Value | None) -> str:
    """A number with what says how sure it is."""
    if value is None:
        return MISSING
    form = describe(name).format
    text = write(value.value, form)
    if value.low is not None:
        return f"{text} [{write_interval(value.low, value.high)}]"
    return f"{text} {write_error(value.value, value.error, form)}".rstrip()


def _curve(curve: Curve, names: Sequence[str]) -> str:
    """One line for each side: its shape, and the value after each iteration."""
    form = describe(curve.name).format
    values = [point.at.value for line in curve.lines for point in line]
    deepest = max(point.step for line in curve.lines for point in line)
    rows = [(curve.label, "", "sft", *map(str, range(1, deepest + 1)))]
    for name, line in zip(names, curve.lines, strict=True):
        at = {point.step: point.at.value for point in line}
        steps = range(deepest + 1)
        shape = "".join(_bar(at.get(step), min(values), max(values)) for step in steps)
        rows.append((name, shape, *(write(at[s], form) if s in at else "" for s in steps)))
    if len(_table(rows).split("\n")[0]) > shutil.get_terminal_size().columns:
        # Too many iterations for a line: the shape, and both ends.
        ends = [[text for text in row[2:] if text] for row in rows[1:]]
        rows = [
            (curve.label, "", "first", "last"),
            *(
                (row[0], row[1], *(end[:1] + end[-1:] or ["", ""]))
                for row, end in zip(rows[1:], ends, strict=True)
            ),
        ]
    return _table(rows)


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    share = (value - low) / (high - low) if high > low else 0.5
    return _BARS[round(share * (len(_BARS) - 1))]


def _pair(pair: Pair, names: Sequence[str], limit: int | None) -> str:
    old, new = names[pair.old], names[pair.new]
    if not pair.num_prompts:
        return f"{new} against {old}: no held-out prompt was answered by both"
    outcome = pair.outcome or "not compared"
    lines = [f"{new} against {old}: {outcome}, over {pair.num_prompts:,} prompts"]
    rows = [(label, text) for label, text in pair_numbers(pair) if text]
    if rows:
        lines += ["  " + line for line in _table(rows, right=False).split("\n")]
    shown = pair.changed[:limit]
    width = max(len(old), len(new))
    for sample in shown:
        lines += ["", *(f"  {line}" for line in _sample(sample, old, new, width))]
    if left := len(pair.changed) - len(shown):
        lines += ["", f"  {left:,} more samples changed sides: -n N, or -n 0 for all"]
    return "\n".join(lines)


def pair_numbers(pair: Pair) -> list[tuple[str, str]]:
    """What the second side does better, in words and numbers."""
    of = pair.numbers
    counts = ", ".join(f"{number:,} {name}" for name, number in pair.counts.items() if number)

    def gain(name: str, form: Form) -> str:
        if name not in of:
            return ""
        value = of[name]
        text = write_change(0.0, value, form)
        return f"{text} {write_error(value, of.get(f'{name}_error'), form)}".rstrip()

    def share(name: str) -> str:
        if name not in of:
            return ""
        value = Value(of[name], of.get(f"{name}_low"), of.get(f"{name}_high"))
        return cell(
            name, value if value.low is not None else Value(of[name], error=of.get(f"{name}_error"))
        )

    return [
        ("prompts", counts),
        ("accuracy gained", gain("accuracy_gain", Form.SHARE)),
        ("reward gained", gain("reward_gain", Form.NUMBER)),
        ("win rate", share("win_rate")),
        ("win rate, sampled", share("win_rate_sampled")),
        ("win rate, similar length", share("win_rate_similar_length")),
    ]


def _sample(sample: ChangedSample, old: str, new: str, width: int) -> list[str]:
    room = shutil.get_terminal_size().columns - 4
    task = f"  [{_short(sample.task)}]" if sample.task else ""
    expected = f"   (expected: {_short(sample.answer)})" if sample.answer is not None else ""
    return [
        f"{sample.outcome}: {_one_line(sample.prompt, room - len(expected))}{expected}{task}",
        _response(old.ljust(width), sample.old, room),
        _response(new.ljust(width), sample.new, room),
    ]


def _response(name: str, response: Response, room: int) -> str:
    start = f"  {name}  {_MARKS[response.correct]} {write(response.reward):>7}  "
    return start + _one_line(response.response or "(empty)", room - len(start))


def _one_line(text: str, width: int) -> str:
    line = " ".join(printable(text).split())
    width = max(width, 20)
    return line if len(line) <= width else line[: width - 1] + "…"


def _short(text: str) -> str:
    return _one_line(text, _LONGEST)


def _table(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Columns under one another; all but the first to the right, if they are numbers."""
    num_columns = max(map(len, rows))
    full = [[*row, *([""] * (num_columns - len(row)))] for row in rows]
    widths = [max(len(row[i]) for row in full) for i in range(num_columns)]
    justify = [str.ljust, *[str.rjust if right else str.ljust] * (num_columns - 1)]
    return "\n".join(
        "  ".join(j(cell, w) for j, cell, w in zip(justify, row, widths, strict=True)).rstrip()
        for row in full
    )
