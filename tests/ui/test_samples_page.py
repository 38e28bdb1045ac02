"""The Samples page in a real browser, over files as stages write them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import at, expect, wrong_with
from tests.ui.recorded_results import HOSTILE, NUM_PROMPTS, SHOWN, SURROGATE, held_out, prompts

pytestmark = pytest.mark.browser
VIEWS = {
    "/samples": ".prompt",
    "/samples?view=rollouts&iteration=iter_001": "td",
    "/samples?view=row&iteration=iter_002&row=0": ".token",
}


def shown(page: Any, words: str) -> None:
    page.wait_for_selector(f".pager:has-text({words!r})")


def submit(page: Any, form: str) -> None:
    page.get_by_role("form", name=form).get_by_role("button", name="Show").click()


def test_answers_stand_side_by_side_and_are_filtered(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(at(open_ui(results), "/samples"))
    shown(page, "1 to 20 of 30 prompts")
    assert page.locator(".prompt").first.locator(".side h3").all_inner_texts() == [
        "sft",
        "iter_001 improved",
    ]
    page.get_by_role("link", name="Next").first.click()
    shown(page, "21 to 30 of 30 prompts")

    page.get_by_label("Answer of iter_001").select_option("changed")
    submit(page, "Which answers")
    changed = {*range(5), held_out().index(HOSTILE)}
    shown(page, f"1 to {len(changed)} of {len(changed)} prompts")
    page.get_by_label("Task").select_option("odd")
    submit(page, "Which answers")
    odd = sum(number % 2 for number in changed)
    shown(page, f"1 to {odd} of {odd} prompts")
    page.go_back()
    shown(page, f"1 to {len(changed)} of {len(changed)} prompts")

    page.goto(page.url.split("?")[0] + "?which=wrong&reward_min=0.2&text=SAYS+2")
    page.wait_for_selector(".prompt")
    said = page.locator(".prompt .side:last-child .sample").all_inner_texts()
    assert said
    assert all(text.startswith("iter_001 says 2") for text in said)
    page.locator(".prompt").first.get_by_role("button", name="Sampled responses").click()
    page.wait_for_selector(".side:has-text('sampled') >> text=, sampled")


def test_rollouts_are_paged_and_filtered(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(at(open_ui(results), "/samples?view=rollouts&iteration=iter_001"))
    shown(page, f"Rows 0 to 49; there are {2 * NUM_PROMPTS}")
    for words in ("Rows 50 to 99", "Rows 100 to 119"):
        page.get_by_role("link", name="Next").first.click()
        shown(page, words)
    assert page.get_by_role("link", name="Next").count() == 0

    page.goto(page.url.split("&start")[0])
    page.get_by_label("Text in prompt").fill("ANSWER 5")
    page.get_by_label("Finish").select_option("length")
    submit(page, "Which rollouts")
    expected = [f"answer {n} 1" for n in range(NUM_PROMPTS) if str(n)[0] == "5"]
    expected = [text for text in expected if prompts()[int(text.split()[1])] != HOSTILE]
    shown(page, f"{len(expected)} matching rows in all")
    assert page.locator("td:nth-child(3) .sample").all_inner_texts() == expected

    page.get_by_role("link", name="Clear").click()
    shown(page, "Rows 0 to 49")
    page.get_by_label("Score of").select_option("verifier")
    page.get_by_label("from", exact=False).first.fill("0.5")
    submit(page, "Which rollouts")
    shown(page, "50 matching rows in the first 100 rows")
    page.get_by_role("link", name="Next").first.click()
    shown(page, "10 matching rows in rows 100 to 119")
    page.reload()
    page.get_by_role("link", name="Previous").first.click()
    shown(page, "50 matching rows in the first 100 rows")
    assert page.get_by_role("link", name="Previous").count() == 0


def test_tokens_say_their_numbers_without_colour(
    results: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(at(open_ui(results), "/samples?view=row&iteration=iter_002&row=0"))
    page.wait_for_selector(".token")
    assert page.locator(".turn h3").all_inner_texts() == [
        "1. policy paid 0.25",
        "2. environment",
        "3. policy paid 0.75",
    ]
    tokens = page.locator("[role=option]")
    assert tokens.all_inner_texts() == ["1", "?", "higher", "2", "<eos>"]
    assert "minus3" in tokens.nth(1).get_attribute("class")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output")).to_have_text(
        'Token 2, "?", id 7: log-prob -3, reference -1, difference -2, advantage -2'
    )
    page.keyboard.press("ArrowRight")
    expect(page.locator("output")).to_contain_text("read, not said by the policy")
    page.get_by_label("Colour").select_option("logprob")
    expect(tokens.nth(1)).to_contain_class("surprise4")
    expect(page.locator(".turns")).to_contain_text("From token 4 on, 2 tokens were read")
    page.get_by_text("The numbers as a table").click()
    table = page.get_by_role("region", name="Tokens as a table")
    expect(table.locator("tbody tr")).to_have_count(5)


def test_hostile_text_stays_text(results: Path, open_ui: Callable[..., str], tabs: Any) -> None:
    link = open_ui(results)
    row = 2 * prompts().index(HOSTILE)
    for path in (
        "/samples?text=onerror",
        "/samples?view=rollouts&iteration=iter_001&text=onerror",
        f"/samples?view=row&iteration=iter_001&row={row}",
    ):
        page = tabs.open(at(link, path))
        page.wait_for_selector(".sample:has-text('onerror')")
        texts = page.locator(".sample").all_inner_texts()
        assert SHOWN in texts, texts
        assert page.locator("main img, main script").count() == 0
        assert "owned" not in page.title()
    assert SURROGATE in page.inner_text("main")
    tabs.expect("400")
    wrong = tabs.open(at(link, "/samples?view=rollouts&iteration=<img%20src=x%20onerror=alert()>"))
    wrong.wait_for_selector(".error:has-text('there are no rollouts of')")
    assert wrong.locator(".error img").count() == 0


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_can_be_used_and_fits(
    results: Path, open_ui: Callable[..., str], tabs: Any, path: str
) -> None:
    page = tabs.open(at(open_ui(results), path))
    page.wait_for_selector(VIEWS[path])
    for _ in tabs.looks(page):
        assert wrong_with(page) == []
