"""The Run page in a real browser, beside a small pipeline that really runs."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import TINY, Clone
from tests.pipeline.test_session import EMPTY_STAGE
from tests.slurm.light_stages import COUNTING_STAGE
from tests.ui.conftest import LOOKS, NARROW, WIDE, at, expect, start_ui, wrong_with
from tests.waiting import stop

pytestmark = pytest.mark.browser


STEPS = 40
COUNTS = COUNTING_STAGE.replace(
    "    epochs =", "    print('counts its steps', flush=True)\n    epochs ="
)


@pytest.fixture
def long_sft(clone: Clone) -> Clone:
    """A small pipeline whose SFT counts, and waits before its last step until it is let go."""
    clone.set_params(**{**TINY, "sft__epochs": STEPS})
    clone.write_code("stages/prepare.py", EMPTY_STAGE)
    clone.write_code("stages/sft.py", COUNTS)
    (clone.root / "hold").touch()
    clone.commit("counts")
    clone.without_tracking()
    # A process that is ready would have to import the code of this clone anew.
    clone.variables["LOCKSTEP_WARM"] = "off"
    return clone


def has_state(page: Any, stage: str, state: str) -> None:
    page.wait_for_selector(f'.stage[data-stage="{stage}"] .word:text-is("{state}")')


def is_shown(page: Any, stage: str) -> None:
    """All of the chosen stage: its log is drawn once the server has told its details."""
    page.wait_for_selector(f"h2:text-is('{stage}')")
    page.wait_for_selector(".stage-view .logs h3")


def counted(page: Any) -> int:
    """How far the chosen stage's job is, once it says so."""
    page.wait_for_selector(".stage-view progress")
    return int(float(page.locator(".stage-view progress").get_attribute("value")))


@pytest.mark.slow
def test_a_run_is_started_watched_cancelled_and_resumed_from_the_page(
    long_sft: Clone, tabs: Any
) -> None:
    server, link = start_ui(long_sft, fresh=True)
    port = int(re.search(r":(\d+)/", link)[1])  # type: ignore[index]
    page, other = tabs.open(at(link, "/run?stage=sft")), tabs.open(link)
    assert "token" not in page.url
    has_state(page, "prepare", "stale")

    page.get_by_role("button", name="Run up to here").click()
    has_state(page, "sft", "running")
    has_state(other, "sft", "running")  # the other tab was told as well
    page.wait_for_selector('figure:has(h3:text-is("loss")) svg.chart')
    page.wait_for_selector('.logs pre:has-text("steps")')
    # A function: the pages' own policy allows no text to be evaluated.
    page.wait_for_function("() => document.querySelector('.stage-view progress')?.value > 1")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    page.get_by_role("button", name="Cancel this stage").click()
    has_state(page, "sft", "cancelled")
    has_state(other, "sft", "cancelled")
    assert long_sft.status("sft")["state"] == "cancelled"

    # Under the open pages the server is killed, and another takes its place.
    tabs.expect(r"ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|Failed to load")
    stop(server, 9)  # type: ignore[arg-type]
    page.wait_for_selector(".connection.lost")
    server, _ = start_ui(long_sft, port, fresh=True)
    page.wait_for_selector(".connection.live")
    other.wait_for_selector(".connection.live")

    page.get_by_role("button", name="Run up to here").click()
    has_state(page, "sft", "running")
    assert counted(page) > 1, "it goes on where it was"
    (long_sft.root / "hold").unlink()
    has_state(page, "sft", "up to date")
    [metrics] = long_sft.root.glob(".lockstep/jobs/sft/*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "each step once"
    has_state(other, "sft", "up to date")
    page.wait_for_selector(".stage-view .facts:has-text('CPU-hours')")
    page.wait_for_selector(".counts:has-text('2 up to date')")
    stop(server)


def write_evaluations(clone: Clone, accuracies: list[float]) -> None:
    folder = clone.root / "metrics/evaluations"
    folder.mkdir(parents=True, exist_ok=True)
    for name, accuracy in zip(("sft", "iter_001", "iter_002"), accuracies, strict=True):
        (folder / f"{name}.json").write_text(json.dumps({"accuracy": accuracy}))


def test_every_part_of_the_page_can_be_used_and_fits(
    clone: Clone, open_ui: Callable[..., str], tabs: Any
) -> None:
    link = open_ui(clone)
    write_evaluations(clone, [0.25, 0.5, 0.75])
    page = tabs.open(at(link, "/run?stage=sft"))
    page.get_by_role("button", name="Plan").click()
    page.wait_for_selector("table:has-text('policy_update@iter_003')")
    accuracy = page.locator('.over figure:has(h3:text-is("Accuracy")) svg')
    expect(accuracy).to_have_attribute("aria-label", "Accuracy: greedy 0.75 at iteration 2")
    expect(page.locator(".stage")).to_have_count(17)
    is_shown(page, "sft")
    for _ in tabs.looks(page, [*LOOKS, (WIDE, "dark"), (NARROW, "light")]):
        assert wrong_with(page) == []
        page.locator('.stage[data-stage="score@iter_002"]').press("Enter")
        is_shown(page, "score@iter_002")
        expect(page).to_have_url(re.compile(r"\?stage=score%40iter_002$"))
        page.go_back()
        is_shown(page, "sft")


def test_a_tab_without_the_token_may_only_look(
    clone: Clone, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.only_looking(open_ui(clone), "/run")
    has_state(page, "prepare", "stale")
    page.wait_for_selector("text=This tab may only look")
    assert page.get_by_role("button", name="Run", exact=True).is_disabled()
    page.locator('.stage[data-stage="prepare"]').click()
    page.wait_for_selector(".stage-view .facts")
    assert page.get_by_role("button", name="Run up to here").is_disabled()


def test_what_is_wrong_with_the_clone_is_said_and_mends(
    clone: Clone, open_ui: Callable[..., str], tabs: Any
) -> None:
    page = tabs.open(open_ui(clone))
    has_state(page, "prepare", "stale")
    params = clone.root / "params.yaml"
    good = params.read_text()
    params.write_text(good.replace("\nsft:\n", "\nsfd:\n"))
    page.wait_for_selector(".problems:has-text('sfd')")
    has_state(page, "prepare", "stale")
    params.write_text(good)
    page.wait_for_selector(".problems:empty", state="attached")
