"""Pages from Jinja templates, `*.html.j2`, with everything that is put into them escaped.

Line ends and indentation of a template are for who edits it: beside a tag or a block, and between
two values, they are nothing; between words they are one space. A value inside a tag has its quotes
escaped; in text they stay. (So compare inside a tag by `is lt`, not by `<`.)

A page needs nothing beside itself, no script and no network. Its policy header forbids both, so
even markup that slipped through could do nothing.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from stages.reporting.markup import escaped

HERE = Path(__file__).parent
FILES = ("page.html.j2", "report.html.j2", "tables.html.j2", "style.css")
"""What the report reads beside its code; part of it as the code is."""
_LINE_END = re.compile(r"(>|%\}|#\}|\}\}(?=\s*\n\s*\{\{))?[ \t]*\n\s*(?=(<|\{%|\{#)?)")
_TAG = re.compile(r"(<[^<>]*>)")
_VALUE = re.compile(r"\{\{(.*?)\}\}")


def render(template: str, folder: Path = HERE, **values: Any) -> str:
    """A page from a template of `folder`, which may extend those that are here."""
    return _environment(folder).get_template(template).render(values)


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FunctionLoader(partial(_load, folder)),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["text"] = partial(escaped, quote=False)
    return environment


def _load(folder: Path, template: str) -> tuple[str, str, None] | None:
    path = next((path for path in (folder / template, HERE / template) if path.is_file()), None)
    if path is None:
        return None
    source = path.read_text(encoding="utf-8")
    return (_compact(source) if path.suffix == ".j2" else source), str(path), None


def _compact(source: str) -> str:
    joined = _LINE_END.sub(
        lambda end: (end[1] or "") + ("" if end[1] or end[2] else " "), source.strip()
    )
    return "".join(
        part if part.startswith("<") else _VALUE.sub(r"{{ (\1)|text }}", part)
        for part in _TAG.split(joined)
    )
