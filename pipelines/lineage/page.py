"""One HTML page to paste in a review: no script, no network, everything escaped.

It is the report's style and its drawing of the graph; what is said is what the other forms say.
"""

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Any

from pipelines.lineage.compare import Comparison, Pair
from pipelines.lineage.compare_text import advice, pair_lines, root_lines, verdict
from pipelines.lineage.facts import facts, value_text
from pipelines.lineage.history import History
from pipelines.lineage.making import Making, short_hash
from pipelines.lineage.naming import role_of
from pipelines.lineage.prompts import Influence, Touched
from pipelines.lineage.row_changes import RowChange
from pipelines.lineage.rows import COLUMNS, Row, Rows
from pipelines.lineage.rows_text import row_name
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Node, Tree, Way
from stages.reporting.family import Family
from stages.reporting.graph import draw
from stages.reporting.markup import Child, Markup, document, element, join
from stages.reporting.style import STYLE

_TEXTS = ("prompt", "response")
_OWN_STYLE = """
section.stage { margin-top: 26px; }
details { border: 1px solid var(--rule); border-radius: 10px; background: var(--surface);
  margin-top: 12px; padding: 10px 16px; }
summary { cursor: pointer; font-weight: 620; }
summary code { margin-left: 10px; color: var(--soft); font-weight: 400; }
details[open] summary { margin-bottom: 8px; }
details table { font-size: 13px; }
details .scroll { border: 0; }
details h3 { margin-top: 14px; color: var(--soft); }
h2 + .scroll, h2 + details { margin-top: 14px; }
details th { width: 15em; color: var(--soft); font-weight: 500; }
details td { overflow-wrap: anywhere; }
.rows td, .rows .sample { white-space: nowrap; }
.rows .text .sample { white-space: pre-wrap; }
.rows td.text { min-width: 11em; white-space: normal; }
.loud { padding: 12px 16px; border: 2px solid var(--wrong); border-radius: 8px; margin-top: 18px;
  color: var(--wrong); font-weight: 620; }
"""


def tree_page(tree: Tree, target: Target, notes: Sequence[str]) -> str:
    """What made a target, or what was made from it."""
    what = "What made" if tree.way is Way.UP else "What was made from"
    title = f"{what} {target.title}"
    artifact = target.artifact
    lead = f"{artifact.path} {artifact.hash}" if artifact else ""
    made = [node for node in tree.nodes.values() if node.making is not None]
    given = [node for node in tree.nodes.values() if node.given is not None]
    sections = [
        _section("graph", "Graph", element("div", _graph(tree), class_="scroll")) if made else None,
        _section("stages", "Stages", [_stage(node, node.id == tree.root) for node in made])
        if made
        else None,
        _section("given", "Given data", _given(given)) if given else None,
    ]
    return _page(title, lead, notes, sections)


def diff_page(
    comparison: Comparison,
    history: History,
    rows: Sequence[RowChange] | None,
    notes: Sequence[str],
) -> str:
    """Why two artifacts differ."""
    title = f"{comparison.old.text} and {comparison.new.text}"
    causes = [element("li", line) for root in comparison.roots for line in root_lines(root)]
    different = [pair for pair in comparison.pairs if pair_lines(pair, history)]
    sections = [
        [element("p", text, class_="loud") for text in advice(comparison)],
        _section("causes", "Root causes, A → B", element("ul", causes, class_="caveats"))
        if causes
        else None,
        _section("sides", "The two", _table([_side(comparison.old), _side(comparison.new)])),
        _section("pairs", "Stage by stage", [_pair(pair, history) for pair in different])
        if different
        else None,
        _section("rows", "Rows that differ", _table([_row_change(item) for item in rows]))
        if rows
        else None,
    ]
    return _page(title, verdict(comparison), notes, sections)


def rows_page(rows: Rows, shown: Sequence[Row], total: int, notes: Sequence[str]) -> str:
    """The rows that a stage learnt from."""
    cells = [[_row_cell(column, row[column]) for column in COLUMNS] for row in shown]
    head = [element("th", column) for column in COLUMNS]
    table = element(
        "div",
        element(
            "table",
            element("thead", element("tr", head)),
            element("tbody", [element("tr", row) for row in cells]),
        ),
        class_="scroll rows",
    )
    files = ", ".join(f"{item.path} {short_hash(item.hash)}" for item in rows.files)
    lead = f"{len(shown)} of {total} rows, from {files}"
    return _page(f"The rows of {rows.making.stage}", lead, notes, [_section("rows", "Rows", table)])


def prompt_page(influence: Influence, notes: Sequence[str]) -> str:
    """What a prompt had a part in."""
    parts = {
        "Trained on it": [_touched(item) for item in influence.direct],
        "Through an ancestor": [_touched(item) for item in influence.indirect],
        "Sampled, not trained on": [_line(item) for item in influence.sampled],
        "Evaluated on it": [_line(item) for item in influence.evaluated],
        "Gone, so not searched": [
            element("tr", element("th", making.stage), element("td", f"{item.path} {item.hash}"))
            for making, item in influence.gone
        ],
    }
    sections = [
        _section(f"s{index}", name, _table(lines))
        for index, (name, lines) in enumerate(parts.items())
        if lines
    ]
    sample = element("p", influence.prompt, class_="sample")
    return _page(f"Prompt {influence.prompt_id}", sample, notes, sections)


def _page(title: str, lead: Child, notes: Sequence[str], sections: Iterable[Child]) -> str:
    caveats = [element("li", note) for note in notes]
    header = element(
        "header",
        element("div", element("p", "Lockstep lineage", class_="brand"), class_="top"),
        element("h1", title),
        element("div", lead, class_="lead"),
        element("ul", caveats, class_="caveats") if caveats else None,
    )
    return document(title, STYLE + _OWN_STYLE, header, element("main", *sections))


def _section(name: str, title: str, *children: Child) -> Markup:
    return element("section", element("h2", title, id=name), *children)


def _graph(tree: Tree) -> Markup:
    """The report's drawing; a stage that occurs twice gets a number."""
    names: dict[str, str] = {}
    for node in tree.nodes.values():
        if node.making is not None:
            stage, number = node.making.stage, 1
            while (name := stage if number == 1 else f"{stage} ({number})") in names.values():
                number += 1
            names[node.id] = name
    above: dict[str, list[str]] = {name: [] for name in names}
    for edge in tree.edges:
        if edge.maker in names and edge.reader in names and edge.maker != edge.reader:
            above[edge.reader].append(edge.maker)
    graph = []
    for name in TopologicalSorter(above).static_order():
        making = tree.nodes[name].making
        assert making is not None
        outs = {path: digest for path, digest in making.outs.items() if "metrics" not in path}
        deps = sorted({names[other] for other in above[name]})
        graph.append({"stage": names[name], "deps": deps, "outs": outs})
    keys = dict.fromkeys(key for node in graph if (key := str(node["stage"]).partition("@")[2]))
    root = names.get(tree.root, "").partition("@")[2]
    order = [key for key in keys if key != root] + ([root] if root else [])
    return draw(graph, Family(dict.fromkeys(order, "") or {"": ""}))


def _stage(node: Node, is_open: bool) -> Markup:
    making = node.making
    assert making is not None
    lines = [(word, text) for word, text in facts(making) if word not in ("params", "outs")]
    tables = [
        _table([_pair_row(word, text) for word, text in lines]),
        _hashes("Outputs", making, making.outs, among_inputs=False),
        _hashes("Inputs", making, making.inputs, among_inputs=True),
        _folded("Params", [(key, value_text(value)) for key, value in making.params.items()]),
        _folded("Code", list(making.code.items())),
        _folded("Environment", [(k, value_text(v)) for k, v in making.environment.items()]),
    ]
    outs = " ".join(short_hash(digest) for digest in list(making.outs.values())[:3])
    return element(
        "details",
        element("summary", making.stage, element("code", outs)),
        tables,
        id=f"m{node.id}",
        open="open" if is_open else None,
    )


def _hashes(title: str, making: Making, items: object, *, among_inputs: bool) -> Markup:
    assert isinstance(items, dict)
    rows = [
        element(
            "tr",
            element("th", role_of(making.stage, path, among_inputs=among_inputs)),
            element("td", path),
            element("td", element("code", digest)),
        )
        for path, digest in items.items()
    ]
    return join(element("h3", title), _table(rows))


def _folded(title: str, items: Sequence[tuple[str, str]]) -> Markup:
    rows = [_pair_row(key, value) for key, value in items]
    return element("details", element("summary", f"{title} ({len(items)})"), _table(rows))


def _given(nodes: Sequence[Node]) -> Markup:
    items = [node.given for node in nodes if node.given is not None]
    return _table([_pair_row(item.path, item.hash) for item in items])


def _side(target: Target) -> Markup:
    artifact, making = target.artifact, target.making
    parts = [
        f"{artifact.path} {artifact.hash}" if artifact else None,
        f"made by {making.stage}" if making else "given",
        *(text for word, text in (facts(making) if making else ()) if word in ("code", "job")),
    ]
    return _pair_row(target.text, ", ".join(part for part in parts if part))


def _pair(pair: Pair, history: History) -> Markup:
    rows = [_pair_row(word, text) for word, text in pair_lines(pair, history)]
    mark = element("code", "a root cause" if pair.found else "follows from its inputs")
    return element("details", element("summary", pair.title, mark), _table(rows), open="open")


def _row_change(change: RowChange) -> Markup:
    row = change.new or change.old or {}
    what = ", ".join(change.fields) or f"only in {'B' if change.old is None else 'A'}"
    responses = [_cell((side or {}).get("response")) for side in (change.old, change.new)]
    return element(
        "tr",
        element("th", row_name(row)),
        element("td", what),
        [element("td", response) for response in responses],
    )


def _touched(item: Touched) -> Markup:
    model = item.model
    what = f"{item.rows} rows" if item.rows else "through " + " → ".join(item.through)
    return element(
        "tr",
        element("th", item.making.stage),
        element("td", what),
        element("td", element("code", model.hash if model else "")),
    )


def _line(making: Making) -> Markup:
    return element("tr", element("th", making.stage))


def _pair_row(word: str, text: str) -> Markup:
    return element("tr", element("th", word), element("td", text))


def _table(rows: Sequence[Markup]) -> Markup:
    return element("div", element("table", element("tbody", rows)), class_="scroll")


def _row_cell(column: str, value: Any) -> Markup:
    """What is long and not to be read is cut short, and whole on hover."""
    if column == "policy_hash" and value:
        return element("td", element("code", short_hash(value)), title=value)
    if column == "advantages" and value is not None:
        mean = f"{sum(value) / len(value):.3g}" if value else "none"
        return element("td", f"mean {mean} of {len(value)}", title=", ".join(map(str, value)))
    if column in _TEXTS:
        return element("td", _cell(value), class_="text")
    return element("td", element("code", value) if isinstance(value, str) else _cell(value))


def _cell(value: object) -> Child:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(f"{item:.3g}" for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item:.4g}" for key, item in value.items())
    return element("span", str(value), class_="sample")
