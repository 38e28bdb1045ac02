"""The Data page in a browser, over files that `prepare` wrote."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipelines.ui.clone import Clone
from tests.ui.conftest import Tabs, at, expect, wrong_with
from tests.ui.prepared_clone import HOSTILE, prepared_clone

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return prepared_clone(tmp_path_factory.mktemp("data") / "clone")


@pytest.fixture
def open_data(clone: Clone, open_ui: Callable, tabs: Tabs) -> Callable[..., Any]:
    link = open_ui(clone.root)

    def open_page(query: str = "", **options: Any) -> Any:
        page = tabs.open(at(link, f"/data{query}"), **options)
        page.wait_for_selector("main[data-ready]")
        return page

    return open_page


def cells(page: Any, label: str) -> list[list[str]]:
    """The body of a table, by its label."""
    rows = page.locator(f'[aria-label="{label}"] tbody tr')
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def trained(page: Any, row: int, part: str) -> str:
    """What is marked as trained on: by its class, as the eye sees it."""
    found = page.locator(".row").nth(row).locator(f"div:has(> h4:text-matches('^{part}:'))")
    return "".join(found.locator(".token.trained").all_text_contents())


def test_counts_reasons_and_dropped_rows_are_shown(open_data: Callable) -> None:
    page = open_data()
    shown = {row[1]: row for row in cells(page, "Sources") if row[0] == "demonstrations"}
    assert shown["shown.jsonl"][3:7] == ["36", "32", "32", "4 (11.1%)"]
    assert set(shown["shown.jsonl"][7].split(", ")) == {
        *("1 unreadable", "1 duplicate", "1 contaminated", "1 too_long")
    }
    page.get_by_role("button", name="Show all dropped rows").click()
    page.wait_for_selector('[aria-label="Dropped rows"]')
    rows = cells(page, "Dropped rows")
    assert [row[1:3] for row in rows] == [
        ["shown.jsonl line 3", "duplicate"],
        ["shown.jsonl line 4", "contaminated"],
        ["shown.jsonl line 5", "too_long"],
        ["shown.jsonl line 6", "unreadable"],
    ]
    expect(page).to_have_url(re.compile("reason=all"))
    page.reload()
    page.wait_for_selector("main[data-ready]")
    assert cells(page, "Dropped rows") == rows


def test_a_search_is_a_link_and_marks_what_is_trained_on(open_data: Callable) -> None:
    page = open_data()
    page.get_by_label("Source of the demonstrations").select_option("chats.jsonl")
    page.get_by_role("button", name="Search").click()
    page.wait_for_selector('.row:only-child:has-text("chats.jsonl")')
    assert trained(page, 0, "response") == "four<eos>five<eos>"
    # Who sees no colours is told by a line under each token, who sees nothing by words.
    lines = page.locator(".row .tokens .token.trained, .row .tokens .token.untrained")
    styles = lines.evaluate_all(
        "all => all.map(of => [of.classList.contains('trained'), "
        "getComputedStyle(of).borderBottomColor !== 'rgba(0, 0, 0, 0)'])"
    )
    assert {tuple(style) for style in styles} == {(True, True), (False, False)}
    assert page.locator(".row .unseen").all_text_contents() == [
        *("[prompt] ", "[trained on] ", "[not trained on] ", "[trained on] ")
    ]
    other = open_data(page.url.partition("/data")[2])
    assert trained(other, 0, "response") == "four<eos>five<eos>"
    page.go_back()
    page.wait_for_selector(".row:nth-child(10)")


def test_a_late_answer_does_not_replace_that_to_a_later_search(open_data: Callable) -> None:
    page = open_data()
    held: list[Any] = []
    first = re.compile(r"/api/data/rows\?.*source=chats")
    page.route(first, lambda route: held.append(route))
    source = page.get_by_label("Source of the demonstrations")
    source.select_option("chats.jsonl")
    with page.expect_request(first):
        page.get_by_role("button", name="Search").click()
    source.select_option("all sources")
    page.get_by_label("Text", exact=True).fill("onerror")
    page.get_by_role("button", name="Search").click()
    shown = page.locator('.row:only-child:has-text("onerror")')
    expect(shown).to_be_visible()
    with page.expect_event("requestfinished", lambda request: first.search(request.url)):
        held[0].continue_()
    # What the page does with it, it has done before it hears another answer.
    page.evaluate("fetch('/api/pages').then(answer => answer.json())")
    expect(shown).to_be_visible()


def test_rows_are_paged_to_the_end(open_data: Callable) -> None:
    page = open_data()
    seen: list[str] = []
    while True:
        seen += page.locator(".row h3").all_inner_texts()
        last = page.get_by_role("button", name="Next rows")
        if last.is_disabled():
            break
        last.click()
        page.wait_for_selector(f'.row:first-child h3:text-is("Row {len(seen)}")')
        expect(page).to_have_url(re.compile(rf"start={len(seen)}\b"))
    assert seen == [f"Row {number}" for number in range(33)]
    for first in (20, 10, 0):
        page.get_by_role("button", name="Previous rows").click()
        page.wait_for_selector(f'.row:first-child h3:text-is("Row {first}")')
    assert page.get_by_role("button", name="Previous rows").is_disabled()


def test_it_is_readable_at_any_width_and_hostile_text_stays_text(
    open_data: Callable, tabs: Tabs
) -> None:
    page = open_data("?reason=all&text=onerror")
    for _ in tabs.looks(page):
        assert not wrong_with(page)
    seen = HOSTILE.replace("\u202e", "\ufffd").replace(" ", "␣")
    assert trained(page, 0, "response") == f"{seen}<eos>"
    assert page.locator("main img").count() == 0
    assert page.title() != "ran"
    assert "\u202e" not in page.content()
