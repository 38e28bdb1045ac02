"""What is asked of the lineage, and in which form the answer is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """The form of an answer."""

    TEXT = "text"
    JSON = "json"
    MERMAID = "mermaid"
    DOT = "dot"
    HTML = "html"


@dataclass(frozen=True)
class Question:
    """One question; `words` are an artifact, or `diff` and two of them."""

    words: Sequence[str]
    format: Format = Format.TEXT
    output: str | None = None
    down: bool = False
    depth: int | None = None
    rows: bool = False
    prompt: str | None = None
    limit: int | None = None
    all_params: bool = False
    ask_mlflow: bool = True
