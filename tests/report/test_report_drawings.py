"""Charts and graph as they are drawn: branches, hashes, boxes."""

import re
from collections.abc import Callable

BRANCHES = {
    "iter_001": {"policy": "sft"},
    "iter_002": {"policy": "iter_001"},
    "low_kl": {"policy": "iter_001"},
    "iter_003": {"policy": "iter_002"},
}


def test_each_branch_is_a_line_that_leaves_its_parent(finished_run: Callable) -> None:
    page, _, _ = finished_run(rl={"iterations": BRANCHES}).report()
    chart = re.search(r'<svg class="chart"[^>]*aria-labelledby="entropy-title.*?</svg>', page)
    assert chart
    lines = {
        branch: points.split()
        for points, branch in re.findall(r'<polyline points="([^"]*)" class="line (b\d)"', chart[0])
    }
    assert len(lines["b0"]) == 4, "sft, iter_001, iter_002, iter_003"
    assert len(lines["b1"]) == 2, "iter_001, low_kl"
    assert lines["b1"][0] == lines["b0"][1]
    across = [point.split(",")[0] for point in (lines["b1"][1], lines["b0"][2])]
    assert across[0] == across[1], "low_kl and iter_002 are as deep as each other"
    assert "low_kl, from iter_001" in page


def test_the_graph_shows_every_stage_and_hash(finished_run: Callable) -> None:
    run = finished_run(rl={"iterations": BRANCHES})
    drawing = re.search(r'<svg class="graph".*?</svg>', run.report()[0], re.DOTALL)
    assert drawing
    for node in run.graph:
        assert node["stage"].replace("@", '</tspan><tspan class="key"> ') in drawing[0]
        for path, digest in node["outs"].items():
            if node["stage"] != "report":
                assert f"<title>{path}\n{digest}</title>" in drawing[0]
                assert f">{digest[:7]}</text>" in drawing[0]


def test_boxes_of_the_graph_do_not_overlap(finished_run: Callable) -> None:
    page, _, _ = finished_run(rl={"iterations": BRANCHES}).report()
    boxes = [
        tuple(map(float, found))
        for found in re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" rx', page
        )
    ]
    assert len(boxes) == 21
    for i, (x, y, w, h) in enumerate(boxes):
        for X, Y, W, H in boxes[i + 1 :]:  # noqa: N806
            assert x + w <= X or x >= X + W or y + h <= Y or y >= Y + H
