"""Rows, and the influence of prompts, as text."""

from collections.abc import Sequence

from pipelines.lineage.prompts import AffectedModel, Influence
from pipelines.lineage.row_changes import RowChange
from pipelines.lineage.rows import Row, Rows
from pipelines.lineage.stage_run import StageRun, short_hash
from stages.reporting.markup import printable

_FEW = 4


def render_rows(rows: Rows, shown: Sequence[Row], total: int) -> str:
    """A block for each row."""
    lines = [f"{rows.stage_run.stage}: {counted(rows, shown, total)}"]
    for row in shown:
        lines += ["", row_name(row), f"  prompt    {_quoted(row['prompt'])}"]
        lines.append(f"  response  {_quoted(row['response'])}")
        if row["reward"] is not None:
            lines.append(f"  reward    {row['reward']:.4g}{_by_source(row)}")
        if row["advantages"] is not None:
            lines.append(f"  advantage {_advantages(row['advantages'])}")
        if row["seed"] is not None:
            digest = row["policy_hash"]
            policy = f"policy {short_hash(digest)}" if digest else "a policy that is no artifact"
            lines.append(f"  sampled   by {policy}, seed {row['seed']}")
        if row["source"]:
            lines.append(f"  read from {row['source']}")
    if len(shown) < total:
        lines += ["", f"{total - len(shown)} rows more: --limit N, or --prompt ID"]
    return "\n".join(lines)


def counted(rows: Rows, shown: Sequence[Row], total: int) -> str:
    """How many rows are shown, and from which files."""
    files = ", ".join(f"{item.path} {short_hash(item.hash)}" for item in rows.files)
    return f"{len(shown)} of {total} rows, from {files}"


def render_changes(changes: Sequence[RowChange], limit: int | None) -> str:
    """Which rows two trainings do not share."""
    only_old = sum(change.new is None for change in changes)
    only_new = sum(change.old is None for change in changes)
    changed = len(changes) - only_old - only_new
    lines = [
        f"Rows: {changed} differ, {only_old} only in A, {only_new} only in B"
        if changes
        else "Rows: all the same"
    ]
    for change in changes[:limit]:
        row = change.new or change.old or {}
        if change.old is None or change.new is None:
            side = "B" if change.old is None else "A"
            lines.append(f"  {row_name(row)}: only in {side}: {_quoted(row['response'])}")
            continue
        lines.append(f"  {row_name(row)}: {', '.join(change.fields)}")
        for side, item in (("A", change.old), ("B", change.new)):
            reward = "" if item["reward"] is None else f"  reward {item['reward']:.4g}"
            lines.append(f"    {side} {_quoted(item['response'])}{reward}")
    if limit is not None and len(changes) > limit:
        lines.append(f"  and {len(changes) - limit} more: --limit N")
    return "\n".join(lines)


def render_influence(influence: Influence) -> str:
    """The models that a prompt influenced."""
    parts = {
        "Trained on it": map(_touched, influence.direct),
        "Through an ancestor": map(_touched, influence.indirect),
        "Sampled, but not trained on": map(_stage, influence.sampled),
        "Held out: evaluated on it, not trained on": map(_stage, influence.evaluated),
        "Not searched, because the files are missing": (
            f"{run.stage}  {item.path} {item.hash}" for run, item in influence.gone
        ),
    }
    lines = [f"prompt {influence.prompt_id}  {_quoted(influence.prompt)}"]
    if not influence.direct:
        lines += ["", "No model whose training data are here was trained on it"]
    for title, items in parts.items():
        if part := [f"  {item}" for item in items]:
            lines += ["", title, *part]
    return "\n".join(lines)


def _touched(item: AffectedModel) -> str:
    model = item.model
    what = f"{item.rows} row{'s' if item.rows > 1 else ''}" if item.rows else ""
    if item.through:
        what = f"via {' → '.join(item.through)}"
    which = f"{model.path} {short_hash(model.hash)}" if model else ""
    return f"{item.stage_run.stage}  {which}  {what}{_where(item.stage_run)}"


def _where(stage_run: StageRun) -> str:
    if stage_run.in_workspace:
        return ""
    return f"  (commit {stage_run.commits[-1][:7]})" if stage_run.commits else "  (ledger)"


def _stage(stage_run: StageRun) -> str:
    return f"{stage_run.stage}{_where(stage_run)}"


def row_name(row: Row) -> str:
    """What identifies a row."""
    step = "" if row["step"] is None else f" step {row['step']}"
    index = "" if row["sample_index"] is None else f" sample {row['sample_index']}"
    return f"{row['prompt_id']}{step}{index} {row['role'] or ''}".rstrip()


def _by_source(row: Row) -> str:
    sources = ", ".join(f"{name} {value:.4g}" for name, value in (row["by_source"] or {}).items())
    return f" ({sources})" if sources else ""


def _advantages(values: Sequence[float]) -> str:
    if not values:
        return "none: the response is empty"
    mean = sum(values) / len(values)
    first = ", ".join(f"{value:.3g}" for value in values[:_FEW])
    more = ", ..." if len(values) > _FEW else ""
    return f"mean {mean:.3g} over {len(values)} tokens: {first}{more}"


def _quoted(text: str | None) -> str:
    """A text on one line: model output may contain any character."""
    return "(not in the file)" if text is None else printable(repr(text))
