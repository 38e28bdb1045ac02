"""One HTML page to paste in a review: no script, no network, everything escaped.

It has the report's style and its drawing of the graph; what is said is what the other forms say.
How it looks is in `pages/`, a template for each kind of page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pipelines.lineage.compare import Comparison
from pipelines.lineage.compare_text import advice, conclusion, pair_lines, root_lines
from pipelines.lineage.facts import facts, value_text
from pipelines.lineage.history import History
from pipelines.lineage.naming import role_of
from pipelines.lineage.prompts import AffectedModel, Influence
from pipelines.lineage.row_changes import RowChange
from pipelines.lineage.rows import COLUMNS, Row, Rows
from pipelines.lineage.rows_text import row_name
from pipelines.lineage.stage_run import StageRun, short_hash
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Direction, Node, Tree
from stages.reporting.family import Family
from stages.reporting.graph import draw
from stages.reporting.templates import render

PAGES = Path(__file__).parent / "pages"
_TEXTS = ("prompt", "response")


@dataclass(frozen=True)
class Cell:
    """What is long and not to be read is cut short, and whole in `title`."""

    text: str
    title: str | None = None
    is_code: bool = False
    is_sample: bool = False
    """Whether it is shown as a model wrote it."""
    is_long: bool = False


def tree_page(tree: Tree, target: Target, notes: Sequence[str]) -> str:
    """What made a target, or what was made from it."""
    what = "What made" if tree.direction is Direction.UP else "What was made from"
    artifact = target.artifact
    made = [node for node in tree.nodes.values() if node.stage_run is not None]
    return render(
        "tree.html.j2",
        PAGES,
        title=f"{what} {target.title}",
        lead=f"{artifact.path} {artifact.hash}" if artifact else "",
        notes=notes,
        graph=_graph(tree) if made else "",
        stages=[_stage(node, node.id == tree.root) for node in made],
        given=[(node.given.path, node.given.hash) for node in tree.nodes.values() if node.given],
    )


def diff_page(
    comparison: Comparison,
    history: History,
    rows: Sequence[RowChange] | None,
    notes: Sequence[str],
) -> str:
    """Why two artifacts differ."""
    stages = [
        {"title": pair.title, "is_root": bool(pair.causes), "lines": lines}
        for pair in comparison.pairs
        if (lines := pair_lines(pair, history))
    ]
    return render(
        "diff.html.j2",
        PAGES,
        title=f"{comparison.old.text} and {comparison.new.text}",
        lead=conclusion(comparison),
        notes=notes,
        advice=advice(comparison),
        causes=[line for root in comparison.roots for line in root_lines(root)],
        sides=[_side(comparison.old), _side(comparison.new)],
        stages=stages,
        rows=[_row_change(change) for change in rows or ()],
    )


def rows_page(rows: Rows, shown: Sequence[Row], total: int, notes: Sequence[str]) -> str:
    """The rows that a stage learnt from."""
    files = ", ".join(f"{item.path} {short_hash(item.hash)}" for item in rows.files)
    return render(
        "rows.html.j2",
        PAGES,
        title=f"The rows of {rows.stage_run.stage}",
        lead=f"{len(shown)} of {total} rows, from {files}",
        notes=notes,
        columns=COLUMNS,
        rows=[[_row_cell(column, row[column]) for column in COLUMNS] for row in shown],
    )


def prompt_page(influence: Influence, notes: Sequence[str]) -> str:
    """What a prompt had a part in."""
    gone = [
        (stage_run.stage, f"{item.path} {item.hash}", None) for stage_run, item in influence.gone
    ]
    parts = {
        "Trained on it": [_touched(item) for item in influence.direct],
        "Through an ancestor": [_touched(item) for item in influence.indirect],
        "Sampled, not trained on": [
            (stage_run.stage, None, None) for stage_run in influence.sampled
        ],
        "Evaluated on it": [(run.stage, None, None) for run in influence.evaluated],
        "Gone, so not searched": gone,
    }
    return render(
        "prompt.html.j2",
        PAGES,
        title=f"Prompt {influence.prompt_id}",
        prompt=influence.prompt,
        notes=notes,
        parts=parts,
    )


def _graph(tree: Tree) -> str:
    """The report's drawing; a stage that occurs twice gets a number."""
    names: dict[str, str] = {}
    for node in tree.nodes.values():
        if node.stage_run is not None:
            stage, number = node.stage_run.stage, 1
            while (name := stage if number == 1 else f"{stage} ({number})") in names.values():
                number += 1
            names[node.id] = name
    above: dict[str, list[str]] = {name: [] for name in names}
    for edge in tree.edges:
        if edge.maker in names and edge.reader in names and edge.maker != edge.reader:
            above[edge.reader].append(edge.maker)
    graph = []
    for name in TopologicalSorter(above).static_order():
        stage_run = tree.nodes[name].stage_run
        assert stage_run is not None
        outs = {path: digest for path, digest in stage_run.outs.items() if "metrics" not in path}
        deps = sorted({names[other] for other in above[name]})
        graph.append({"stage": names[name], "deps": deps, "outs": outs})
    keys = dict.fromkeys(key for node in graph if (key := str(node["stage"]).partition("@")[2]))
    root = names.get(tree.root, "").partition("@")[2]
    order = [key for key in keys if key != root] + ([root] if root else [])
    return draw(graph, Family(dict.fromkeys(order, "") or {"": ""}))


def _stage(node: Node, is_open: bool) -> dict[str, Any]:
    stage_run = node.stage_run
    assert stage_run is not None
    lines = [(word, text) for word, text in facts(stage_run) if word not in ("params", "outs")]
    return {
        "id": node.id,
        "is_open": is_open,
        "name": stage_run.stage,
        "short": " ".join(short_hash(digest) for digest in list(stage_run.outs.values())[:3]),
        "facts": lines,
        "outs": _hashes(stage_run, stage_run.outs, among_inputs=False),
        "inputs": _hashes(stage_run, stage_run.inputs, among_inputs=True),
        "folded": {
            "Params": [(key, value_text(value)) for key, value in stage_run.params.items()],
            "Code": list(stage_run.code.items()),
            "Environment": [(k, value_text(v)) for k, v in stage_run.environment.items()],
        },
    }


def _hashes(
    stage_run: StageRun, items: Mapping[str, Any], *, among_inputs: bool
) -> list[tuple[str, str, str]]:
    return [
        (role_of(stage_run.stage, path, among_inputs=among_inputs), path, digest)
        for path, digest in items.items()
    ]


def _side(target: Target) -> tuple[str, str]:
    artifact, stage_run = target.artifact, target.stage_run
    parts = [
        f"{artifact.path} {artifact.hash}" if artifact else None,
        f"made by {stage_run.stage}" if stage_run else "given",
        *(
            text
            for word, text in (facts(stage_run) if stage_run else ())
            if word in ("code", "job")
        ),
    ]
    return target.text, ", ".join(part for part in parts if part)


def _row_change(change: RowChange) -> dict[str, Any]:
    return {
        "name": row_name(change.new or change.old or {}),
        "what": ", ".join(change.fields) or f"only in {'B' if change.old is None else 'A'}",
        "old": _cell((change.old or {}).get("response")),
        "new": _cell((change.new or {}).get("response")),
    }


def _touched(item: AffectedModel) -> tuple[str, str, str]:
    what = f"{item.rows} rows" if item.rows else "through " + " → ".join(item.through)
    return item.stage_run.stage, what, item.model.hash if item.model else ""


def _row_cell(column: str, value: Any) -> Cell:
    if column == "policy_hash" and value:
        return Cell(short_hash(value), title=value, is_code=True)
    if column == "advantages" and value is not None:
        mean = f"{sum(value) / len(value):.3g}" if value else "none"
        return Cell(f"mean {mean} of {len(value)}", title=", ".join(map(str, value)))
    if column in _TEXTS:
        return replace(_cell(value), is_long=True)
    return Cell(value, is_code=True) if isinstance(value, str) else _cell(value)


def _cell(value: object) -> Cell:
    if value is None:
        return Cell("")
    if isinstance(value, float):
        return Cell(f"{value:.4g}")
    if isinstance(value, list):
        return Cell(", ".join(f"{item:.3g}" for item in value))
    if isinstance(value, dict):
        return Cell(", ".join(f"{key} {item:.4g}" for key, item in value.items()))
    return Cell(str(value), is_sample=True)
