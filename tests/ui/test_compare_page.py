"""The Compare page in a browser, over policies that DVC recorded."""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from pipelines.commands.cli import main
from tests.conftest import copy_tree
from tests.control.recorded_policies import Recorded
from tests.control.test_compare import HOSTILE, made  # noqa: F401  (a fixture)
from tests.lineage.world import Page
from tests.ui.conftest import Tabs, at, wrong_with

pytestmark = pytest.mark.browser


@pytest.fixture
def open_compare(open_ui: Callable, tabs: Tabs, made: Recorded) -> Callable[..., Any]:  # noqa: F811
    link = open_ui(made.root)

    def open_page(query: str = "", **options: Any) -> Any:
        page = tabs.open(at(link, f"/compare{query}"), **options)
        page.wait_for_selector("main[data-ready]")
        return page

    return open_page


def command(root: Path, capsys: Any, *words: str) -> Any:
    """What `lockstep WORDS --json` says in a clone."""
    capsys.readouterr()
    with chdir(root):
        assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cells(page: Any, label: str) -> list[list[str]]:
    rows = page.locator(f'[aria-label="{label}"] tbody tr')
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def test_the_numbers_are_those_of_the_command(
    made: Recorded,  # noqa: F811
    open_compare: Callable,
    capsys: Any,
) -> None:
    page = open_compare()
    sides = ["first", "bold-dove", "iter_002"]
    page.get_by_role("button", name="Add a side").click()
    for index, name in enumerate(sides):
        page.get_by_label(f"Side {'ABC'[index]}").fill(name)
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_selector('[aria-label="Metrics"]')
    said = command(made.root, capsys, "compare", *sides, "-n", "5")
    asked = page.evaluate(
        "fetch('/api/compare/sides' + location.search.replace(/[abc]=/g, 'side=') + '&limit=5')"
        ".then(answer => answer.json())"
    )
    assert asked["comparison"] == said

    assert cells(page, "Params that differ") == [
        ["policy_update.learning_rate", "0.1", "0.3", "0.2"]
    ]
    assert [row[0] for row in cells(page, "Metrics")] == [row["label"] for row in said["metrics"]]
    reward = next(row for row in cells(page, "Metrics") if row[0] == "Reward")
    assert reward[1:] == ["0.800 ± 0.040", "0.400", "1.000"]
    pair = dict(cells(page, "iter_002 against first"))
    assert pair["prompts"].startswith("1 improved")
    assert page.locator(".sample-pair").count() == sum(len(p["changed"]) for p in said["pairs"])
    assert page.locator("figure svg.chart").count() == len(said["curves"])

    other = open_compare(page.url.partition("/compare")[2])
    assert cells(other, "Metrics") == cells(page, "Metrics")


def test_the_files_are_those_of_the_command(
    made: Recorded,  # noqa: F811
    open_compare: Callable,
    capsys: Any,
    tmp_path: Path,
) -> None:
    page = open_compare("?a=first&b=iter_002")
    found = {}
    for name in ("JSON", "One page for a review (HTML)"):
        with page.expect_download() as download:
            page.get_by_role("link", name=name).click()
        found[name] = Path(download.value.path()).read_text()
    said = command(made.root, capsys, "compare", "first", "iter_002", "-n", "0")
    assert json.loads(found["JSON"]) == said
    with chdir(made.root):
        assert main(["compare", "first", "iter_002", "--html", str(tmp_path / "page.html")]) == 0
    assert found["One page for a review (HTML)"] == (tmp_path / "page.html").read_text()
    assert "iter_002 against first" in Page(found["One page for a review (HTML)"]).text


def test_names_that_exist_are_offered(open_compare: Callable) -> None:
    page = open_compare()
    page.get_by_text("Names that exist").click()
    rows = cells(page, "Names that exist")
    assert [row[:3] for row in rows[:3]] == [
        ["workspace", "workspace", ""],
        ["bold-dove", "experiment", "an experiment"],
        ["first", "tag", "first"],
    ]
    assert [row[1:3] for row in rows[3:]] == [["commit", "two iterations"], ["commit", "first"]]
    table = page.locator('[aria-label="Names that exist"]')
    table.locator("tr", has_text="bold-dove").get_by_role("button", name="iter_001").click()
    table.get_by_role("button", name="iter_002").first.click()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_selector('[aria-label="Metrics"]')
    assert [row[0] for row in cells(page, "Sides")] == ["bold-dove:iter_001", "iter_002"]


def test_what_cannot_be_compared_is_said_on_the_page(open_compare: Callable, tabs: Tabs) -> None:
    tabs.expect("400")  # the browser notes every refused request
    page = open_compare()
    address = page.url.partition("?")[0]
    for query, expected in (
        ("?a=sftt&b=iter_001", "did you mean 'sft'?"),
        ("?a=sft", "name at least two to compare"),
        ("?a=first&b=first%3Aiter_001", "are the same policy"),
        ("?a=--output%3Dx&b=sft", "neither a policy"),
    ):
        page.goto(address + query)
        page.wait_for_selector("main[data-ready]")
        assert expected in page.locator(".failure").inner_text()


def test_it_is_readable_at_any_width_and_hostile_text_stays_text(
    open_compare: Callable, tabs: Tabs
) -> None:
    page = open_compare("?a=first&b=iter_002&c=bold-dove&samples=0")
    for _ in tabs.looks(page):
        assert not wrong_with(page)
    plain = HOSTILE.partition("\x1b")[0]
    assert any(plain in text for text in page.locator("pre").all_inner_texts())
    assert page.locator("main script").count() == 0
    assert "\u202e" not in page.content()


def test_what_a_change_would_cost_is_that_of_the_command(
    open_ui: Callable, tabs: Tabs, tmp_path: Path, capsys: Any
) -> None:
    clone = copy_tree(tmp_path / "clone")
    tabs.expect("400")
    page = tabs.open(at(open_ui(clone), "/compare"))
    page.get_by_label("Settings").fill("rl.algorithmm=grpo")
    page.get_by_role("button", name="Plan").click()
    page.wait_for_selector(".failure")
    assert "did you mean rl.algorithm?" in page.locator(".failure").inner_text()
    setting = "+rl.iterations.iter_004={policy: iter_003}"
    page.get_by_label("Settings").fill(setting)
    page.get_by_role("button", name="Plan").click()
    page.wait_for_selector('[aria-label="Stages that would run"]')
    said = [row for row in command(clone.root, capsys, "plan", "-S", setting) if row["stale"]]
    rows = cells(page, "Stages that would run")
    assert [row[0] for row in rows] == [row["address"] for row in said]
    assert "policy_update@iter_004" in [row[0] for row in rows]
    assert [row[4] for row in rows] == [", ".join(row["reasons"]) for row in said]
