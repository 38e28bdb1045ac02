"""The page in a real browser: it is drawn, stays within the screen, and complains of nothing."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import ARGUMENTS, BROWSERS, find_browser
from tests.waiting import TIMEOUT_S

pytestmark = pytest.mark.browser

# The page forbids scripts in itself, so it is measured from a page around it.
HARNESS = """<!doctype html><body style="margin:0">
<pre id="found"></pre>
<script>
const measure = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const size = svg => { const box = svg.getBoundingClientRect(); return [box.width, box.height]; };
  document.getElementById("found").textContent = JSON.stringify({
    headline: page.querySelector("h1").innerText,
    charts: [...page.querySelectorAll("svg.chart")].map(size),
    graph: [...page.querySelectorAll("svg.graph")].map(size),
    warnings: [...page.querySelectorAll(".warnings li")].map(size),
    labels: [...page.querySelectorAll("svg.chart text.value")].map(text => text.getBBox().width),
    scripts: page.scripts.length,
    overflow: root.scrollWidth - root.clientWidth,
    ran: document.title,
  });
};
</script>
<iframe src="report/index.html" onload="measure(this)"
  style="border:0;width:WIDTHpx;height:900px"></iframe>"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Opens a file in a headless browser; returns the DOM, and fails on anything in the console."""
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def open_page(page: Path, *options: str) -> str:
        done = subprocess.run(
            [
                found,
                "--headless",
                *ARGUMENTS,
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        assert not complaints
        return done.stdout

    return open_page


@pytest.mark.parametrize("width", [1200, 400])
def test_everything_is_drawn_and_fits_the_screen(
    finished_run: Callable, browse: Callable, width: int
) -> None:
    run = finished_run(task=lambda number: "carry" if number % 3 else "no carry")
    attack = "<script>parent.document.title = 'ran'</script>"
    for policy, reward, right in (("sft", -99.0, False), ("iter_003", 99.0, True)):
        run.change_sample(policy, 0, response=attack, reward=reward, correct=right)
    run.change_evaluation("iter_003", entropy=0.001, truncation_rate=0.9)
    run.report()
    harness = run.root / "harness.html"
    harness.write_text(HARNESS.replace("WIDTH", str(width)))

    size = f"--window-size={width},1000"
    dom = browse(harness, "--allow-file-access-from-files", "--dump-dom", size)

    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1])  # type: ignore[index]
    assert found["headline"].startswith("It learned: accuracy rose from 40.2% to")
    assert len(found["charts"]) == 10  # six of held-out prompts, four of training
    for chart_width, chart_height in found["charts"]:
        assert 250 < chart_width < width
        assert chart_height > 150
    assert found["graph"][0][0] >= 900, "the graph scrolls rather than shrink past reading"
    assert len(found["warnings"]) == 2
    assert all(250 < box[0] < width and box[1] > 40 for box in found["warnings"])
    assert len(found["labels"]) >= 20
    assert min(found["labels"]) > 0
    assert found["scripts"] == 0
    assert found["ran"] != "ran"
    assert found["overflow"] <= 0, "the page itself must not scroll sideways"


def test_light_and_dark_are_painted_and_differ(finished_run: Callable, browse: Callable) -> None:
    run = finished_run()
    run.report()
    paper = {}
    for scheme, setting in (("dark", 0), ("light", 1)):
        shot = run.root / f"{scheme}.png"
        browse(
            run.root / "report/index.html",
            f"--screenshot={shot}",
            "--window-size=520,480",
            f"--blink-settings=preferredColorScheme={setting}",
        )
        with Image.open(shot) as picture:
            pixels = picture.convert("RGB")
        assert len(pixels.getcolors(1 << 24)) > 50, "text, lines and cards leave many colours"
        paper[scheme] = sum(pixels.getpixel((0, 0)))
    assert paper["dark"] < 128 < 600 < paper["light"]
