"""README, CONTRIBUTING and docs read well in a terminal and in a diff."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST_LINE = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_a_screen(page: Path) -> None:
    """Rows of tables cannot be wrapped."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    long = [n for n, line in lines if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert not long, f"{page.name}: wrap lines {long} at {LONGEST_LINE} characters"
