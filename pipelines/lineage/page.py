"""One HTML page to paste in a review: no script, no network, everything escaped.

It has the report's style and its drawing of the graph; what is said is what the other forms say.
How it looks is in `pages/`, a template for each kind of page.
"""

from collections import Counter
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pipelines.lineage.compare import Comparison
from pipelines.lineage.compare_text import advice, conclusion, pairs_with_lines, root_line
from pipelines.lineage.facts import facts, value_text
from pipelines.lineage.naming import role_of
from pipelines.lineage.prompts import AffectedModel, Influence
from pipelines.lineage.row_changes import RowChange
from pipelines.lineage.rows import COLUMNS, Row, Rows
from pipelines.lineage.rows_text import counted, row_name
from pipelines.lineage.stage_run import StageRun, short_hash
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Direction, Node, Tree
from stages.reporting.family import Family
from stages.reporting.graph import draw
from stages.reporting.templates import render

PAGES = Path(__file__).parent / "pages"
_BELOW = ("params", "outs")
"""Facts that have a table of their own."""


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
    comparison: Comparison, root: Path, rows: Sequence[RowChange], notes: Sequence[str]
) -> str:
    """Why two artifacts differ; `root`: the clone whose commits are named."""
    return render(
        "diff.html.j2",
        PAGES,
        title=f"{comparison.old.text} and {comparison.new.text}",
        lead=conclusion(comparison),
        notes=notes,
        advice=advice(comparison),
        causes=[root_line(cause) for cause in comparison.roots],
        sides=[_side(comparison.old), _side(comparison.new)],
        pairs_with_lines=pairs_with_lines(comparison, root),
        rows=[(row_name(change.new or change.old or {}), change) for change in rows],
    )


def rows_page(rows: Rows, shown: Sequence[Row], total: int, notes: Sequence[str]) -> str:
    """The rows that a stage learnt from."""
    return render(
        "rows.html.j2",
        PAGES,
        title=f"The rows of {rows.stage_run.stage}",
        lead=counted(rows, shown, total),
        notes=notes,
        columns=COLUMNS,
        rows=shown,
    )


def prompt_page(influence: Influence, notes: Sequence[str]) -> str:
    """What a prompt had a part in."""
    parts: dict[str, list[tuple[str, str | None, str | None]]] = {
        "Trained on it": [_touched(item) for item in influence.direct],
        "Through an ancestor": [_touched(item) for item in influence.indirect],
        "Sampled, not trained on": [(run.stage, None, None) for run in influence.sampled],
        "Evaluated on it": [(run.stage, None, None) for run in influence.evaluated],
        "Gone, so not searched": [
            (run.stage, f"{item.path} {item.hash}", None) for run, item in influence.gone
        ],
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
    times: Counter[str] = Counter()
    for node in tree.nodes.values():
        if node.stage_run is not None:
            stage = node.stage_run.stage
            times[stage] += 1
            names[node.id] = stage if times[stage] == 1 else f"{stage} ({times[stage]})"
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
    return {
        "id": node.id,
        "is_open": is_open,
        "name": stage_run.stage,
        "short": " ".join(short_hash(digest) for digest in list(stage_run.outs.values())[:3]),
        "facts": [(word, text) for word, text in facts(stage_run) if word not in _BELOW],
        "outs": _hashes(stage_run, among_inputs=False),
        "inputs": _hashes(stage_run, among_inputs=True),
        "folded": {
            "Params": [(key, value_text(value)) for key, value in stage_run.params.items()],
            "Code": list(stage_run.code.items()),
            "Environment": [(k, value_text(v)) for k, v in stage_run.environment.items()],
        },
    }


def _hashes(stage_run: StageRun, *, among_inputs: bool) -> list[tuple[str, str, str]]:
    return [
        (role_of(stage_run.stage, path, among_inputs=among_inputs), path, digest)
        for path, digest in (stage_run.inputs if among_inputs else stage_run.outs).items()
    ]


def _side(target: Target) -> tuple[str, str]:
    artifact, stage_run = target.artifact, target.stage_run
    known = dict(facts(stage_run)) if stage_run else {}
    parts = [
        f"{artifact.path} {artifact.hash}" if artifact else None,
        f"made by {stage_run.stage}" if stage_run else "given",
        known.get("code"),
        known.get("job"),
    ]
    return target.text, ", ".join(filter(None, parts))


def _touched(item: AffectedModel) -> tuple[str, str | None, str | None]:
    what = f"{item.rows} rows" if item.rows else "through " + " → ".join(item.through)
    return item.stage_run.stage, what, item.model.hash if item.model else ""
