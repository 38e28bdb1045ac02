"""Elements of drawings that cannot be broken by what is put into them.

`element` escapes every child and attribute that is not already `Markup`, as templates do.
Characters that steer a terminal or turn the direction of text are made visible by `printable`:
models emit them, and the page and the summary show them.
"""

import html
from collections.abc import Iterable
from typing import Any, TypeAlias

_BIDI_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "␡",
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDI_CONTROLS), "\N{REPLACEMENT CHARACTER}"),
}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()

    def __html__(self) -> str:
        """How templates know it."""
        return self


Child: TypeAlias = str | Iterable[str | None] | None
Attribute: TypeAlias = str | float | None


def printable(text: str) -> str:
    """The text with control characters as pictures; line breaks and tabs stay."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def escaped(value: Any, *, quote: bool = True) -> Any:
    """A value as markup for an attribute, or for text (without `quote`); markup as it is."""
    if hasattr(value, "__html__"):
        return value
    return Markup(html.escape(printable(str(value)), quote=quote))


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element. `class_` becomes class, `stroke_width` stroke-width; None is left out."""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(_attribute_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{pairs}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Children one after the other, each escaped unless it is markup."""
    return Markup("".join(map(_render, children)))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, str):
        return str(escaped(child, quote=False))
    return "".join(map(_render, child))


def _attribute_value(value: str | float) -> str:
    if isinstance(value, str):
        return value
    # Two decimals are finer than a pixel, and hide the last bits of floating-point arithmetic.
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
