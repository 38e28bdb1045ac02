"""What is put into a template is escaped for its place; its line ends are not in the page."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from pipelines.lineage.page import PAGES
from stages.reporting import templates

HOSTILE = """<b title="x">'&\x1b"""


def rendered(folder: Path, template: str, **values: object) -> str:
    (folder / "one.html.j2").write_text(template)
    return templates.render("one.html.j2", folder, **values)


def test_what_is_put_in_stays_where_it_was_put(tmp_path: Path) -> None:
    page = rendered(tmp_path, '<p title="{{ it }}">{{ it if it else "" }}</p>', it=HOSTILE)
    shown = "&lt;b title=&quot;x&quot;&gt;&#x27;&amp;␛"
    assert page == f'<p title="{shown}">&lt;b title="x"&gt;\'&amp;␛</p>'


def test_line_ends_are_for_who_edits_a_template(tmp_path: Path) -> None:
    template = (
        "<ul>\n  {% for x in y %}\n  <li>{{ x }} of\n    {{ x }}</li>\n  {% endfor %}\n</ul>\n"
    )
    assert rendered(tmp_path, template, y=[1, 2]) == "<ul><li>1 of 1</li><li>2 of 2</li></ul>"


def test_a_value_that_nobody_gave_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="'gone' is undefined"):
        rendered(tmp_path, "<p>{{ gone }}</p>")


def test_every_file_that_the_report_reads_is_named() -> None:
    folder = templates.HERE
    beside = {path.name for path in folder.iterdir() if path.suffix not in (".py", "")}
    assert beside == set(templates.FILES)


def test_no_template_compares_inside_a_tag() -> None:
    """There the signs of a comparison would be taken for those of a tag."""
    for path in (*templates.HERE.glob("*.j2"), *PAGES.glob("*.j2")):
        for part in path.read_text().split("{%")[1:]:
            assert not set("<>") & set(part.partition("%}")[0]), f"{path.name}: {part}"
