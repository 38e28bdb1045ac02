"""Names from a user's data in Markdown are shown as they are."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from stages.reporting.markdown import code, in_cell, plain
from tests.report.reader import MARKED_UP, NAMES, Cells, shown

TEXTS = st.text("ab|<>`*_[]()\\~&!; \n", min_size=1, max_size=12)


@given(TEXTS.filter(lambda text: text == text.strip()))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    for markdown, tags in ((plain(text), set()), (code(text), {"code"})):
        cells = Cells(f"| {in_cell(markdown)} | b |\n| --- | --- |\n")
        assert cells.texts[0] == shown(text)
        assert cells.tags == {"table", "thead", "tr", "th"} | tags


def test_the_summary_shows_names_of_tasks_as_they_are(finished_run: Callable) -> None:
    names = [name[:28] for name in NAMES]
    run = finished_run(task=lambda number: names[number % len(names)])
    _, summary, _ = run.report()
    cells = Cells(summary)
    assert set(map(shown, names)) <= set(cells.texts)
    assert not cells.tags & MARKED_UP
