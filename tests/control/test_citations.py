"""What docstrings, comments and docs cite of this repository exists: files, and tests in them.

A program cites a file from the root or from a folder that it is in itself, a document from any
folder; after `::` follows the name of a test. Users' own files and what runs leave do not count.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
CITED = re.compile(
    r"(?<![\w./{}*~-])(?:\.\./)*((?:[\w-]+/)*[\w-]+\.(?:py|md)"
    r"|(?:stages|pipelines|docs|tests|benchmarks|tools)/[\w/.-]*\w(?![\w{*-]))(?:::(\w+))?"
)
OF_USERS = {
    "city_server.py",
    "environments/adding.py",
    "environments/cards.py",
    "environments/cities.py",
    "environments/city_server.py",
    "environments/search.py",
    "environments/solver.py",
    "environments/sums.py",
    "environments/tool.py",
    "environments/word_server.py",
    "environments/words.py",
    "rewards/mine.py",
    "summary.md",
}
NOT_RECORDED = {"benchmarks/results/resident.json"}


def sentences(path: Path) -> Iterator[str]:
    """A document's text; a program's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    if not CITED.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    # Tokenising is slow, and few files have a comment that may cite something.
    if any("#" in line and CITED.search(line) for line in text.splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def missing(path: Path, text: str) -> list[str]:
    """What the text cites in vain, if it is in the file at `path`."""
    lost = []
    for cited, test in CITED.findall(text):
        places = [folder / cited for folder in path.parents if folder.is_relative_to(ROOT)]
        if path.suffix == ".md":
            places += [ROOT / file for file in FILES if file.endswith(f"/{cited}")]
        there = [place for place in places if place.exists()]
        if test:
            there = [file for file in there if f"def {test}(" in file.read_text(encoding="utf-8")]
        if not there and cited not in OF_USERS | NOT_RECORDED:
            lost.append(f"{cited}::{test}" if test else cited)
    return lost


@pytest.mark.parametrize("suffix", [".py", ".md"])
def test_what_is_cited_exists(suffix: str) -> None:
    cited_by = [ROOT / file for file in FILES if file.endswith(suffix) and (ROOT / file).exists()]
    lost = [
        f"{path.relative_to(ROOT)}: {cited}"
        for path in cited_by
        for text in sentences(path)
        for cited in missing(path, text)
    ]
    assert not lost


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("as in made_up.py and `stages/score.py`", []),
        ("see stages/gone.py", ["stages/gone.py"]),
        ("see `../docs/gone.md`", ["docs/gone.md"]),
        ("the package stages/engines/gone holds it", ["stages/engines/gone"]),
        ("tests/control/made_up.py::gone", ["tests/control/made_up.py::gone"]),
        ("score.py is in another folder", ["score.py"]),
    ],
)
def test_what_is_gone_is_found(text: str, lost: list[str]) -> None:
    assert missing(Path(__file__), text) == lost
