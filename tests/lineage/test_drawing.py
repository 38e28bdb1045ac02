"""Mermaid and Graphviz get nothing that breaks their grammar."""

import re
import shutil
import subprocess

import pytest

from pipelines.lineage.drawing import Box, Drawing, Kind, dot, draw, mermaid
from pipelines.lineage.tree import Direction, build_tree
from tests.lineage.conftest import HOSTILE
from tests.lineage.world import chain, lock, run_index, stage_run, target

NASTY = (
    HOSTILE,
    'say "hi" \\ back\\',
    "end",
    "a@b/c; d -->|x| e",
    "#quot; %% comment",
    "[[x]](y){z}",
    "\x00\x1b[31m",
    "class click subgraph",
)
DRAWING = Drawing(
    [Box((text, text), kind) for text, kind in zip(NASTY, list(Kind) * 2, strict=True)],
    [(index, (index + 1) % len(NASTY), text) for index, text in enumerate(NASTY)],
)
_MERMAID = re.compile(
    r"""\ {4}(?:
        n\d+(?:\["[^"\[\]{}<>|;`]*(?:<br>[^"\[\]{}<>|`]*)*"\]
              |\[\("[^"]*"\)\]):::\w+
      | n\d+\ -->(?:\|"[^"|]*"\|)?\ n\d+
      | classDef\ \w+\ fill:\#\w{6},stroke:\#\w{6},color:\#\w{6}
    )""",
    re.VERBOSE,
)
_STRING = r'"(?:[^"\\\n]|\\[\\"n])*"'
_DOT = re.compile(
    rf"    (?:n\d+ \[label={_STRING}, fillcolor={_STRING}, color={_STRING}\]"
    rf"|n\d+ -> n\d+ \[label={_STRING}\]|rankdir=LR"
    rf"|node \[shape=box, style={_STRING}, fontname={_STRING}\]);"
)


def unescaped(text: str) -> str:
    """What Mermaid shows for a label."""
    return re.sub(r"#(\d+);", lambda match: chr(int(match[1])), text)


def test_hostile_names_stay_inside_their_labels_in_mermaid() -> None:
    first, *lines = mermaid(DRAWING).splitlines()
    assert first == "flowchart LR"
    for line in lines:
        bare = re.sub(r"#\d+;", "", line)
        assert _MERMAID.fullmatch(bare), line
    assert len(lines) == 2 * len(NASTY) + len(Kind)
    assert "<script>" not in "\n".join(lines)
    shown = unescaped(lines[0])
    assert '<script>alert("x")</script>' in shown


def test_hostile_names_stay_inside_their_labels_in_dot() -> None:
    first, *lines, last = dot(DRAWING).splitlines()
    assert (first, last) == ("digraph lineage {", "}")
    for line in lines:
        assert _DOT.fullmatch(line), line


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it() -> None:
    done = subprocess.run(
        ["dot", "-Tsvg"], input=dot(DRAWING), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('class="node"') == len(NASTY)


def test_two_artifacts_between_two_stages_are_one_arrow() -> None:
    first = stage_run(
        "sft", {}, {"artifacts/policies/sft/model": "m", "artifacts/policies/sft/state": "s"}
    )
    second = stage_run("policy_update@iter_001", dict(first.outs), {"x": "x"})
    drawing = draw(
        build_tree(run_index(lock("workspace", first, second)), target(second), Direction.UP)
    )
    assert [(start, end) for start, end, _ in drawing.arrows] == [(1, 0)]
    assert drawing.arrows[0][2] == "policy m\nstate s"


def test_what_was_asked_about_and_what_was_given_look_different() -> None:
    made = chain()
    drawing = draw(build_tree(run_index(lock("workspace", *made)), target(made[-1]), Direction.UP))
    assert [box.kind for box in drawing.boxes] == [
        Kind.CHOSEN,
        Kind.STAGE,
        Kind.STAGE,
        Kind.GIVEN,
    ]
