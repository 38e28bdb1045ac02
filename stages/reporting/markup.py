"""Elements of drawings that cannot be broken by what is put into them.

`element` escapes every child and attribute that is not already `Markup`, as templates do.
Characters that steer a terminal or turn the direction of text are made visible by `printable`:
models emit them, and the page and the summary show them.
"""

import html
from collections.abc import Iterable
from typing import TypeAlias

_BIDI_CONTROLS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}


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
    return "".join(_picture(char) for char in text.replace("\r\n", "\n"))


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """One element. `class_` becomes class, `stroke_width` stroke-width; None is left out."""
    pairs = "".join(
        f' {_attribute_name(name)}="{html.escape(_attribute_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{pairs}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Children one after the other, each escaped unless it is markup."""
    return Markup("".join(_render(child) for child in children))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(printable(child), quote=False)
    return "".join(_render(part) for part in child)


def _attribute_name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _attribute_value(value: str | float) -> str:
    if isinstance(value, str):
        return printable(value)
    # Two decimals are finer than a pixel, and hide the last bits of floating-point arithmetic.
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _picture(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or 0x20 <= code < 0x7F:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if 0x80 <= code < 0xA0 or code in _BIDI_CONTROLS:
        return "\N{REPLACEMENT CHARACTER}"
    return char
