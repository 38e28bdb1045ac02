"""What the commands say: plain lines always, one line that changes in place only on a terminal."""

import os
import shutil
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipelines.base import atomic
from stages.progress import seconds as seconds
from stages.standard_error import error_name

if TYPE_CHECKING:
    from stages.health import Symptom


def say_anything() -> None:
    """Let this process print any text, also where the locale has no letters for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


PROGRESS_FILE: Path | None = None
"""Where this process keeps its one line that changes, for those who look from elsewhere."""


class Console:
    """Lines for people. Not a terminal: no progress, no control characters."""

    def __init__(self, stream: TextIO | None = None, *, is_terminal: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._file = PROGRESS_FILE
        self.is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._shown = ""

    @property
    def shows_progress(self) -> bool:
        return self.is_terminal or self._file is not None

    def line(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)

    def progress(self, text: str) -> None:
        """Replace the line that changes in place, cut to what the terminal shows."""
        if self._file is not None and text != self._shown:
            aside = atomic.unique(self._file)
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self._file)
            self._shown = text
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        if self.is_terminal and text != self._shown:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._shown = text

    def clear(self) -> None:
        if self._file is not None and self._shown:
            self._file.unlink(missing_ok=True)
        elif self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = ""


def describe_warnings(warnings: "Iterable[Symptom]") -> str:
    """Marks for a line that has no room for more."""
    return "  ".join(f"! {symptom.kind.words}" for symptom in warnings)


_HEADLINE = (
    "accuracy",
    "pairwise_accuracy",
    "reward_mean",
    "kl_to_reference",
    "entropy",
    "accuracy_gain",
    "loss",
    "response_length",
)


_ROUNDING = 1e-6
"""A KL below this is what rounding makes of 0."""


def describe_metrics(metrics: dict[str, Any], most: int = 4) -> str:
    """The few numbers that tell most about a stage."""
    chosen = [name for name in _HEADLINE if name in metrics] or list(metrics)
    return "  ".join(_with_error(name, metrics) for name in chosen[:most])


def _with_error(name: str, metrics: dict[str, Any]) -> str:
    value, error = metrics[name], metrics.get(error_name(name))
    if name == "kl_to_reference" and abs(value) < _ROUNDING:
        return f"{name} 0"
    return f"{name} {value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def ago(when: float) -> str:
    return f"{seconds(max(time.time() - when, 0))} ago"
