"""Markdown that cannot be broken by what is put into it.

Tasks and files are called what a user's data call them, and a page that shows Markdown takes HTML
in it for HTML.
"""

import re

from stages.reporting.markup import printable

_MARKUP = re.compile(r"[\\`*\[\]<>~&]|(?<!\w)_|_(?!\w)")


def plain(text: str) -> str:
    """A text in a line, shown as it is."""
    return _MARKUP.sub(lambda match: f"\\{match[0]}", one_line(text))


def code(text: str) -> str:
    """The same as code, between more backticks than it has in a row."""
    line = one_line(text)
    most = max(map(len, re.findall("`+", line)), default=0)
    space = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") else ""
    return f"{'`' * (most + 1)}{space}{line}{space}{'`' * (most + 1)}"


def one_line(text: str) -> str:
    """A text with its line breaks and what steers a terminal made visible."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def in_cell(markdown: str) -> str:
    """Markdown as one cell of a table."""
    return markdown.replace("|", r"\|")
