"""Servers of pages, and a browser to open them in.

A page is opened at the link that the command prints. A test fails on anything that a page writes to
the browser's console but what it expects.
"""

import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pipelines.base.repository import Repository
from pipelines.ui.app import create_app
from pipelines.ui.clone import open_clone
from tests.browser import ARGUMENTS, BROWSERS, find_browser
from tests.conftest import Clone
from tests.waiting import TIMEOUT_S, until, until_said

WIDE, NARROW = 1280, 390
LOOKS = ((WIDE, "light"), (NARROW, "dark"))
"""Each width and each scheme once."""


@pytest.fixture
def open_ui() -> Iterator[Callable[[Clone | Path], str]]:
    """Serves the pages of a clone from this process; returns the link, token included."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(clone: Clone | Path) -> str:
        opened = open_clone(Repository(clone if isinstance(clone, Path) else clone.root))
        app = create_app(opened)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        app.state.is_ending = lambda: server.should_exit
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        until(lambda: server.started, "the server of the pages", at_work=thread.is_alive)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/#token={opened.token}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(TIMEOUT_S)


def start_ui(
    clone: Clone, port: int = 0, *, fresh: bool = False
) -> tuple[subprocess.Popen[str], str]:
    """The command `lockstep ui` itself, and the link that it prints.

    A fresh one starts processes as users' do; what is forked has them forked elsewhere.
    """
    start = clone.start if fresh else clone.start_forked
    process = start("lockstep", "ui", "--port", str(port))
    said = until_said(process, "http://")
    return process, re.search(r"http://\S+", said)[0]  # type: ignore[index]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with recorded results of two iterations. Read it, do not write."""
    from tests.ui.recorded_results import make_results

    return make_results(tmp_path_factory.mktemp("results") / "clone")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of a file."""
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield opened
        opened.close()


class Tabs:
    """Opens tabs, and knows what their pages have complained of."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self._complaints: list[str] = []
        self._expected: list[str] = []

    def open(self, url: str, width: int = WIDE, scheme: str = "light") -> Any:
        """A page at that address, in a profile of its own."""
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self._contexts.append(context)
        context.set_default_timeout(TIMEOUT_S * 1000)
        return self._watched(context.new_page(), url)

    def only_looking(self, link: str, path: str, width: int = WIDE) -> Any:
        """Another tab of a browser in which the link was opened: it has no token."""
        first = self.open(link, width)
        first.wait_for_selector("header.top nav a")
        return self._watched(first.context.new_page(), link.split("/#")[0] + path)

    def _watched(self, page: Any, url: str) -> Any:
        page.on("console", lambda said: self._complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self._complaints.append(f"error: {error}"))
        page.goto(url)
        return page

    def looks(self, page: Any, looks: Sequence[tuple[int, str]] = LOOKS) -> Iterator[None]:
        """The page as it is at these widths and in these schemes, one after the other."""
        for width, scheme in looks:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(
                "([width, scheme]) => innerWidth === width"
                " && matchMedia(`(prefers-color-scheme: ${scheme})`).matches",
                arg=[width, scheme],
            )
            yield

    def expect(self, complaint: str) -> None:
        """From now on this pattern in a complaint is no failure."""
        self._expected.append(complaint)

    @property
    def complaints(self) -> list[str]:
        def is_expected(complaint: str) -> bool:
            return any(re.search(pattern, complaint) for pattern in self._expected)

        return [each for each in self._complaints if not is_expected(each)]

    def close(self) -> None:
        for context in self._contexts:
            with suppress(Exception):
                context.close()


@pytest.fixture
def tabs(browser: Any) -> Iterator[Tabs]:
    opened = Tabs(browser)
    yield opened
    opened.close()
    assert opened.complaints == []


def at(link: str, path: str) -> str:
    """The link of another page, with the token."""
    address, token = link.split("/#")
    return f"{address}{path}#{token}"


def expect(shown: Any) -> Any:
    """Playwright's assertions on a page or a part of it: they wait for what comes later."""
    from playwright import sync_api

    sync_api.expect.set_options(timeout=TIMEOUT_S * 1000)
    return sync_api.expect(shown)


def wrong_with(page: Any) -> list[str]:
    """What axe finds serious or critical, and whether the page scrolls sideways."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    wrong = [
        f"{rule['id']}: {[node['target'] for node in rule['nodes']]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
    over = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return wrong + ([f"{over} pixels too wide"] if over > 0 else [])
