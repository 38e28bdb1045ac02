"""Every command of README and docs is typed in a finished clone, in the order of its page.

A block of commands (```sh, ```python) runs, unless the line above it says why it cannot run here:
`<!-- not run: it needs a cluster -->`. Those are the skipped tests, each with its reason. Anything
else (output, settings) says by its language that it is no command: a fence without one is refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.pipeline.conftest import commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "rewards/*.md", "recipes/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
NO_COMMANDS = {"text", "yaml", "json"}
STAND_INS = {"iter_003": "iter_001", "iter_002": "sft"}
"""Policies of the pipeline as it ships, and those that the small one of the tests has."""
FENCE = re.compile(r"(?:^<!-- not run: (.+) -->\n)?^```(.*)\n((?s:.*?))^```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start(2)].count("\n") + 1, match[2], match[3], match[1])
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language not in NO_COMMANDS]


def test_a_block_says_whether_it_is_one_of_commands() -> None:
    assert [
        f"{block.name}: ```{block.language}; say sh, python, {', '.join(sorted(NO_COMMANDS))}"
        for block in COMMANDS
        if block.language not in ("sh", "python")
    ] == []
    assert sum("```" in page.read_text() for page in PAGES) == len({b.page for b in BLOCKS})


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=pytest.mark.skip(reason=f"{block.name}: {block.not_run}"))
        for block in COMMANDS
        if block.not_run
    ],
    ids=lambda block: block.name,
)
def test_a_block_that_cannot_run_here(block: Block) -> None:
    """Listed by pytest, with the reason that the page gives."""


@pytest.mark.parametrize(
    "page",
    list(dict.fromkeys(block.page for block in COMMANDS if not block.not_run)),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run(
    page: Path, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.run("git", "tag", "first")
    if page == ROOT / "README.md":
        as_after_make_demo(finished)
    if page == ROOT / "docs/presets.md":
        # Presets are checked against the sizes that ship.
        finished.run("git", "checkout", "--quiet", "HEAD~2", "params.yaml")
    before = untracked(finished)
    monkeypatch.chdir(finished.root)
    for block in blocks(page):
        if block.not_run:
            continue
        if block.language == "python":
            exec(compile(block.text, block.name, "exec"), {})
            mlflow.set_tracking_uri(None)
        elif block.language == "sh":
            for line in block.text.splitlines():
                type_in(finished, line)
    assert untracked(finished) == before, "the commands leave files that git does not ignore"


def as_after_make_demo(clone: Any) -> None:
    """Results that nobody has committed."""
    clone.run("git", "tag", "--delete", "first")
    clone.run("git", "reset", "--quiet", "HEAD~1")


def untracked(clone: Any) -> set[str]:
    listed = clone.run("git", "ls-files", "--others", "--exclude-standard").stdout
    return {name for name in listed.split() if not name.startswith(("metrics/", "dvc.lock"))}


def type_in(clone: Any, line: str) -> None:
    """A line of a page."""
    for words in commands(line):
        words = [re.sub("|".join(STAND_INS), lambda name: STAND_INS[name[0]], w) for w in words]
        if words[0] == "export":
            clone.variables |= dict([words[1].split("=", 1)])
        elif words != ["source", ".venv/bin/activate"]:
            clone.run(*words)
