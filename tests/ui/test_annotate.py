"""The Annotate page in a real browser: keys judge, makers stay hidden, nothing is judged twice."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.annotations import queue, store
from pipelines.annotations.judgement import Choice, Judgement, Origin, Response
from pipelines.annotations.pair import Pair, identified
from tests.ui.conftest import at, wrong_with

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=\"document.title='ran'\">"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose queue has four pairs of a policy called `keen` and one called `calm`."""
    pairs = [
        identified(
            Pair(
                messages=({"role": "user", "content": f"{number}+2= {HOSTILE}"},),
                one=Response(
                    text=f"the sum of {number} and two {HOSTILE}",
                    policy="keen",
                    policy_hash="aa.dir",
                    seed=1,
                    rewards={"reward": 0.5},
                ),
                other=Response(
                    text=f"nothing of {number}",
                    policy="calm",
                    policy_hash="bb.dir",
                    seed=2,
                    rewards={"reward": -0.5},
                ),
                origin=Origin(place="queue", iteration="iter_001", prompt_id=str(number)),
            )
        )
        for number in range(4)
    ]
    queue.extend(tmp_path, pairs, 2)
    return tmp_path


def begin(page: Any, name: str) -> None:
    page.get_by_label("Your name").fill(name)
    page.get_by_label("Your name").press("Enter")
    page.wait_for_selector(".sides")


def judged(page: Any, number: int) -> None:
    page.wait_for_selector(f"#progress:text-matches('{number} of 4 pairs judged')")


def kept(clone: Path) -> tuple[Judgement, ...]:
    return store.read(clone).judgements


def test_keys_judge_pairs_whose_makers_are_hidden(
    clone: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(at(open_ui(clone), "/annotate"))
    told: list[Any] = []
    page.on("response", lambda got: told.append(got) if "/next" in got.url else None)
    begin(page, "Ann Lee")
    judged(page, 0)
    shown = page.content() + "".join(got.text() for got in told)
    assert "nothing of" in shown
    assert not re.search("keen|calm|dir|0\\.5|seed", shown), "nothing tells who made them"

    page.keyboard.press("1")
    page.wait_for_selector(".last:has-text('You preferred the left one'):has-text('keen')")
    judged(page, 1)
    page.keyboard.press("ArrowRight")
    judged(page, 2)
    page.get_by_label("Note").fill("1 of 2 both 0")
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    judged(page, 3)
    said = kept(clone)
    assert [each.chosen for each in said] == [Choice.LEFT, Choice.RIGHT, Choice.TIE]
    assert [each.note for each in said] == ["", "", "1 of 2 both 0"]
    assert {each.annotator for each in said} == {"ann-lee"}
    for each in said:
        pair = queue.read_queue(clone)[str(each.origin.pair)]
        assert (each.left, each.right) == pair.sides("ann-lee")

    page.keyboard.press("u")
    judged(page, 2)
    page.wait_for_selector(".last:has-text('withdrawn')")
    page.keyboard.press("2")
    judged(page, 3)
    page.keyboard.press("s")
    page.wait_for_selector("text=Nothing is left for you to judge")
    assert [each.chosen for each in kept(clone)] == [
        *(Choice.LEFT, Choice.RIGHT, Choice.RIGHT, Choice.SKIP)
    ]
    page.reload()
    judged(page, 4)
    page.wait_for_selector("dt:has-text('ann-lee') + dd:has-text('3 judged, 0 ties, 1 skips')")


def test_two_tabs_and_a_held_key_judge_no_pair_twice(
    clone: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    link = at(open_ui(clone), "/annotate")
    one, other = tabs.open(link), tabs.open(link)
    begin(one, "ann")
    begin(other, "ann")
    assert one.locator(".sides").inner_text() == other.locator(".sides").inner_text()
    one.keyboard.press("1")
    judged(one, 1)
    other.keyboard.press("2")
    other.wait_for_selector(".error:has-text('ann has judged pair')")
    judged(other, 1)
    assert [each.chosen for each in kept(clone)] == [Choice.LEFT]
    for _ in range(5):
        other.keyboard.down("0")  # held: all but the first are repeats
    judged(other, 2)
    other.keyboard.up("0")
    other.get_by_role("button", name="Skip").click()
    judged(other, 3)
    assert [each.chosen for each in kept(clone)] == [Choice.LEFT, Choice.TIE, Choice.SKIP]


def test_what_was_sampled_stays_text_and_a_tab_without_the_token_may_only_look(
    clone: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    long = "word" * 400
    [first, *_] = queue.read_queue(clone).values()
    queue.extend(clone, [identified(replace(first, one=replace(first.one, text=long)))], 9)
    link = open_ui(clone)
    page = tabs.open(at(link, "/annotate"))
    page.wait_for_selector(".agreement h2")
    for _ in tabs.looks(page):
        assert wrong_with(page) == []
    begin(page, "bo")
    page.wait_for_selector(f'.asking:has-text("{HOSTILE.replace(chr(34), chr(92) + chr(34))}")')
    for _ in tabs.looks(page):
        assert wrong_with(page) == []
    assert page.title() != "ran"
    looking = tabs.only_looking(link, "/annotate")
    begin(looking, "cy")
    looking.wait_for_selector("text=This tab may only look")
    assert looking.get_by_role("button", name="Tie").is_disabled()
    tabs.expect("403")
    looking.keyboard.press("1")
    looking.wait_for_selector(".error:has-text('this tab may only look')")
    assert kept(clone) == ()
