"""The Lineage page in a real browser, over what DVC and git have recorded."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages.data.seeds import content_id
from tests.ui.conftest import NARROW, at, expect, wrong_with
from tests.ui.recorded_results import HOSTILE, SHOWN, prompts

pytestmark = pytest.mark.browser
LAYOUT_OF_200 = """async () => {
  const { layout } = await import("/static/lineage_layout.js");
  const names = ["prepare", "sft", "reward"];
  const edges = [["prepare", "sft"], ["prepare", "reward"]];
  for (let i = 0; i < 50; i += 1) {
    const policy = i ? `update${i - 1}` : "sft";
    const [r, s, u, e] = ["rollout", "score", "update", "evaluate"].map(stage => stage + i);
    names.push(r, s, u, e);
    edges.push([policy, r], ["prepare", r], [r, s], ["reward", s], ["sft", s]);
    edges.push([s, u], [r, u], [policy, u], [u, e]);
  }
  const sized = names.map(name => ({ name, width: 90 + name.length, height: 46 }));
  const made = layout(sized, edges);
  return [Object.fromEntries(made.boxes), made.lines];
}"""


def test_a_prompt_is_followed_to_its_checkpoints_and_back(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    number = 7
    page = tabs.open(at(open_ui(results), f"/samples?view=row&iteration=iter_001&row={2 * number}"))
    page.get_by_role("link", name="Checkpoints trained on this prompt").click()
    page.wait_for_selector(f"h2:has-text('{content_id(prompts()[number])}')")
    trained = page.locator("section:has(h2:text-is('Trained on it')) li")
    assert sorted(trained.all_inner_texts()) == [
        "policy_update@iter_001 1 rows (not of the workspace) show them",
        "policy_update@iter_001 1 rows show them",
    ]
    through = page.locator("section:has(h2:text-is('Through an ancestor')) li")
    assert "policy_update@iter_002" in through.first.inner_text()

    trained.first.get_by_role("link", name="show them").click()
    page.wait_for_selector(".pager:has-text('1 matching row in')")
    assert page.locator("td:nth-child(3) .sample").all_inner_texts() == [f"answer {number} 0"]
    page.get_by_role("link", name="Lineage", exact=True).last.click()
    page.wait_for_selector("h2:has-text('What made')")
    page.get_by_role("link", name="Rows that trained it").first.click()
    page.wait_for_selector(".pager:has-text('50 matching rows')")


def test_a_tree_leads_on_and_its_rows_are_shown(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(at(open_ui(results), "/lineage?target=policy@iter_002"))
    page.wait_for_selector("h2:text-is('What made policy@iter_002')")
    assert page.locator(".tree h3").first.inner_text() == "policy_update@iter_002"
    page.locator(".tree").get_by_role("link", name="rollout@iter_002").first.click()
    page.wait_for_selector("h2:text-is('What made rollout@iter_002')")
    page.get_by_label("A policy, artifact").fill("policy@sft")
    page.get_by_label("Direction").select_option("yes")
    page.get_by_role("form", name="Lineage of one").get_by_role("button", name="Show").click()
    page.wait_for_selector("h2:text-is('What came of policy@sft')")
    assert page.locator(".tree h3:has-text('policy_update@iter_001')").count() >= 1


def test_the_graph_is_read_and_followed_by_keyboard(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    link = open_ui(results)
    page = tabs.open(at(link, "/lineage?target=policy@iter_002&depth=4"))
    root = page.locator("svg.lineage a[tabindex='0']")
    assert root.get_attribute("aria-label") == "policy_update@iter_002"
    edges = page.locator("svg.lineage .edge")
    root.focus()
    reading = page.locator(".lineage-graph .reading")
    expect(reading).to_contain_text("rollout@iter_002 (rollouts")
    expect(edges.and_(page.locator(".near"))).to_have_count(3)
    # Along the lines to what came first, which is the file that was given.
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("svg.lineage a[aria-label='given.txt, given']")).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("h2:text-is('What made sft')")
    narrow = tabs.open(at(link, "/lineage?target=policy@iter_002"), NARROW)
    narrow.wait_for_selector(".tree")
    assert not narrow.locator("svg.lineage").is_visible()


def test_boxes_of_a_large_graph_do_not_touch_and_lines_lead_to_the_right(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(open_ui(results))
    boxes, lines = page.evaluate(LAYOUT_OF_200)
    assert len(boxes) == 203
    for name, box in boxes.items():
        for other, beside in boxes.items():
            apart = abs(box["y"] - beside["y"]) >= box["height"] + 10
            assert name == other or box["column"] != beside["column"] or apart, (name, other)
    columns = sorted((box["column"], box["x"], box["x"] + box["width"]) for box in boxes.values())
    for (column, _, right), (after, left, _) in pairwise(columns):
        assert column == after or right < left
    for line in lines:
        across = [x for x, _ in line["points"]]
        assert across == sorted(across), line


def test_two_differ_for_a_reason(results: Path, open_ui: Callable[..., str], tabs: Any) -> None:
    page = tabs.open(at(open_ui(results), "/lineage"))
    page.get_by_text("Why do two differ?").click()
    page.get_by_label("A", exact=True).fill("first:policy@iter_001")
    page.get_by_label("B", exact=True).fill("policy@iter_001")
    page.get_by_role("form", name="Two to compare").get_by_role("button", name="Show").click()
    page.wait_for_selector("h2:text-is('They differ.')")
    causes = page.locator("section:has(h2:has-text('Root causes')) li").all_inner_texts()
    assert len(causes) == 1
    assert "policy_update.learning_rate 0.0001 → 0.001" in causes[0]
    tabs.expect("400")
    page.goto(page.url.split("?")[0] + "?old=policy@iter_001&new=nonsense")
    page.wait_for_selector(".error:has-text('nonsense')")


def test_hostile_prompts_stay_text_and_every_view_fits(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    link, prompt = open_ui(results), content_id(HOSTILE)
    for path in (
        f"/lineage?prompt={prompt}",
        "/lineage?target=policy@iter_002&depth=4",
        "/lineage?old=first:policy@iter_001&new=policy@iter_001",
    ):
        page = tabs.open(at(link, path))
        page.wait_for_selector("main h2")
        for _ in tabs.looks(page):
            assert wrong_with(page) == []
        assert page.locator("main img, main script").count() == 0
        if "prompt=" in path:
            assert page.locator(".sample").all_inner_texts() == [SHOWN]
