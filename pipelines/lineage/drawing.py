"""Graphs for other programs to draw: Mermaid and Graphviz.

Nodes have generated names, and labels are quoted, so that no stage, path or value can break the
syntax: a policy may have any name that DVC allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelines.lineage.compare import Comparison
from pipelines.lineage.facts import code
from pipelines.lineage.stage_run import short_hash
from pipelines.lineage.tree import Node, Tree


class Kind(StrEnum):
    """How a node is drawn."""

    STAGE = "stage"
    GIVEN = "given"
    CHOSEN = "chosen"
    """The target; in a comparison, a root cause."""
    DIFFERENT = "different"


@dataclass(frozen=True)
class Box:
    """A node as it is drawn."""

    lines: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True)
class Drawing:
    """Boxes, and labelled arrows between them by their indices."""

    boxes: Sequence[Box]
    arrows: Sequence[tuple[int, int, str]]


_FILL = {
    Kind.STAGE: ("#eef2f7", "#5b6b7f"),
    Kind.GIVEN: ("#ffffff", "#9aa5b1"),
    Kind.CHOSEN: ("#fff3d6", "#b7791f"),
    Kind.DIFFERENT: ("#fde8e4", "#b3382c"),
}


def draw(tree: Tree) -> Drawing:
    """The tree's nodes, and one arrow for all artifacts that passed between two of them."""
    places = {name: index for index, name in enumerate(tree.nodes)}
    passed: dict[tuple[str, str], list[str]] = {}
    for edge in tree.edges:
        passed.setdefault((edge.maker, edge.reader), []).append(tree.label(edge))
    return Drawing(
        [_box(node, chosen=name == tree.root) for name, node in tree.nodes.items()],
        [(places[a], places[b], "\n".join(labels)) for (a, b), labels in passed.items()],
    )


def draw_comparison(comparison: Comparison) -> Drawing:
    """The pairs that differ; those with a root cause are highlighted."""
    shown = [pair for pair in comparison.pairs if pair.outs or pair.causes or pair.inputs]
    places = {pair.id: index for index, pair in enumerate(shown)}
    boxes = [
        Box(
            (pair.title, ", ".join(dict.fromkeys(cause.kind.value for cause in pair.causes))),
            Kind.CHOSEN if pair.causes else Kind.DIFFERENT,
        )
        for pair in shown
    ]
    arrows = [
        (places[change.pair], places[pair.id], change.role)
        for pair in shown
        for change in pair.inputs
        if change.pair in places
    ]
    return Drawing(boxes, arrows)


def _box(node: Node, *, chosen: bool) -> Box:
    if node.stage_run is None:
        assert node.given is not None
        return Box((node.given.path, short_hash(node.given.hash)), Kind.GIVEN)
    return Box((node.stage_run.stage, code(node.stage_run)), Kind.CHOSEN if chosen else Kind.STAGE)


def mermaid(drawing: Drawing) -> str:
    """A flowchart for a Markdown page."""
    lines = ["flowchart LR"]
    for index, box in enumerate(drawing.boxes):
        text = "<br>".join(_mermaid_text(line) for line in box.lines if line)
        opening, closing = ("[(", ")]") if box.kind is Kind.GIVEN else ("[", "]")
        lines.append(f'    n{index}{opening}"{text}"{closing}:::{box.kind}')
    for start, end, label in drawing.arrows:
        text = "<br>".join(_mermaid_text(line) for line in label.split("\n"))
        lines.append(f'    n{start} -->|"{text}"| n{end}' if label else f"    n{start} --> n{end}")
    for kind in sorted({box.kind for box in drawing.boxes}):
        fill, stroke = _FILL[kind]
        lines.append(f"    classDef {kind} fill:{fill},stroke:{stroke},color:#161b22")
    return "\n".join(lines) + "\n"


def _mermaid_text(text: str) -> str:
    """Every character that means something to Mermaid, HTML or Markdown, as its number."""
    return "".join(
        char if char.isalnum() or char in " .,-_/@:=+()" else f"#{ord(char)};"
        for char in " ".join(text.split())
        if char.isprintable()
    )


def dot(drawing: Drawing) -> str:
    """A graph for Graphviz."""
    lines = [
        "digraph lineage {",
        "    rankdir=LR;",
        '    node [shape=box, style="rounded,filled", fontname="Helvetica"];',
    ]
    for index, box in enumerate(drawing.boxes):
        fill, stroke = _FILL[box.kind]
        label = _dot_text("\n".join(line for line in box.lines if line))
        lines.append(f'    n{index} [label={label}, fillcolor="{fill}", color="{stroke}"];')
    for start, end, label in drawing.arrows:
        lines.append(f"    n{start} -> n{end} [label={_dot_text(label)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(char for char in escaped if char.isprintable())}"'
