"""The Chat page in a real browser, with processes in which tiny policies really answer."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from pipelines.annotations import store
from pipelines.annotations.judgement import Choice
from pipelines.annotations.pair import pair_id
from tests.tiny_policy import chat_clone
from tests.ui.conftest import NARROW, at, wrong_with

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
"""What the SFT policy says in place of a letter."""
BESIDE = "/chat?left=sft&right=iter_001&temperature=0&max_new_tokens=24"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return chat_clone(tmp_path_factory.mktemp("clone"), words={"t": HOSTILE}).root


def engines() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended has no words
            if "stages.chat.engine" in child.cmdline():
                found.append(child)
    return found


@pytest.fixture
def _no_engine_is_left() -> Iterator[None]:
    """Once the server has ended, which a test asks for after this."""
    yield
    assert engines() == []


def answers(page: Any, count: int) -> list[str]:
    """What the policies have said, once there are so many answers and all of them are whole."""
    page.wait_for_function(
        """count => {
          const said = [...document.querySelectorAll(".message.assistant .note")];
          return said.length === count && said.every(each => / tokens/.test(each.textContent));
        }""",
        arg=count,
    )
    return page.locator(".message.assistant .sample").all_text_contents()


@pytest.mark.usefixtures("_no_engine_is_left")
def test_two_policies_are_asked_judged_and_stopped_by_keyboard(
    root: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    link = open_ui(root)
    page = tabs.open(at(link, BESIDE))
    page.wait_for_selector("#question:focus")
    page.keyboard.type("12+7=")
    page.keyboard.press("Enter")
    left, right = answers(page, 2)
    page.wait_for_selector(".judge:focus")
    assert len(engines()) == 2
    # Whatever a policy says is text.
    assert HOSTILE in left
    assert page.locator(".log img").count() == 0
    assert "owned" not in page.title()
    assert page.locator('[role="log"][aria-live="polite"][aria-busy="false"]').count() == 2
    assert wrong_with(page) == []

    page.fill("#annotator", "Ann Lee")
    page.press("#prefer-right", "2")
    page.wait_for_selector("#note:has-text('iter_001 is better')")
    page.wait_for_selector("#question:focus")
    page.keyboard.type("ab")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("c")
    page.keyboard.press("Enter")
    _, again, _, other = answers(page, 4)
    page.wait_for_selector(".judge:focus")
    page.keyboard.press("0")
    page.wait_for_selector("#note:has-text('a tie')")

    first, second = store.read(root).judgements
    assert (first.left.text, first.right.text) == (left, right)
    assert (first.left.policy, first.right.policy) == ("sft", "iter_001")
    assert len({first.left.policy_hash, first.right.policy_hash, ""}) == 3
    assert first.left.sampling["max_new_tokens"] == 24
    assert first.left.seed is None  # the likeliest tokens, which no seed draws
    assert first.messages == ({"role": "user", "content": "12+7="},)
    assert (first.chosen, first.annotator, first.origin.place) == (Choice.RIGHT, "ann-lee", "chat")
    assert first.origin.pair == pair_id(first.messages, (), right, left)
    # Both went on from the better answer.
    assert [message["content"] for message in second.messages] == ["12+7=", right, "ab\nc"]
    assert (second.left.text, second.right.text) == (again, other)
    assert second.chosen is Choice.TIE

    alone = tabs.open(at(link, "/chat?left=sft&temperature=0&max_new_tokens=30000"), NARROW, "dark")
    alone.wait_for_selector("#question:focus")
    alone.keyboard.type("12+7=")
    alone.keyboard.press("Enter")
    alone.wait_for_selector(f".message.assistant .sample:has-text('{HOSTILE[:8]}')")
    alone.click("#stop")
    [said] = answers(alone, 1)
    alone.wait_for_selector(".message.assistant .note:has-text('stopped')")
    alone.wait_for_selector("#send:enabled")
    # It is stopped sooner or later than the answer of 24 tokens ends.
    assert said.startswith(left) or left.startswith(said)
    assert wrong_with(alone) == []
    alone.fill("#max_new_tokens", "24")
    alone.click("#reset")
    alone.fill("#question", "12+7=")
    alone.keyboard.press("Enter")
    assert answers(alone, 1) == [left]


def test_without_the_token_nothing_starts(
    root: Path, open_ui: Callable[..., str], tabs: Any
) -> None:
    link = open_ui(root)
    address = link.split("/#")[0]
    tabs.expect("403")
    page = tabs.only_looking(link, BESIDE)
    page.wait_for_selector("#note:has-text('This tab may only look')")
    page.fill("#question", "12+7=")
    page.click("#send")
    page.wait_for_selector(".error:has-text('may only look')")
    assert page.locator(".message").count() == 0
    body = {"id": "an-answer", "policy": "sft", "messages": [{"role": "user", "content": "1"}]}
    for path in ("answer", "stop", "preference"):
        asked = urllib.request.Request(
            f"{address}/api/chat/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Lockstep-Token": "wrong"},
        )
        with pytest.raises(HTTPError, match="403"):
            urllib.request.urlopen(asked)
    assert engines() == []
