"""What a reader of Markdown makes of a text; and names that it could take for more than names."""

from html.parser import HTMLParser

from markdown_it import MarkdownIt

NAMES = (
    "a|b",
    "<img src=x onerror=alert(1)>",
    "[click](http://x.example)",
    "*x* _y_ **z** ~~no~~ two_words",
    "a\\|`b` &lt;",
    "# one\n\n# two",
    "``",
)
READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


MARKED_UP = {"img", "a", "em", "strong", "s"}


class Cells(HTMLParser):
    """The tags of a page, and the texts of the cells of its tables."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self._inside = False
        self.feed(READER.render(markdown))

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.texts.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def shown(name: str) -> str:
    """A name with its line breaks made visible."""
    return name.replace("\n", "⏎")
