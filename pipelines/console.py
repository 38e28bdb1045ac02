"""What the commands say: plain lines always, one line that changes in place only on a terminal."""

import shutil
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from stages.health import Symptom


def say_anything() -> None:
    """Let this process print any text, also where the locale has no letters for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Console:
    """Lines for people. Not a terminal: no progress, no control characters."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._shown = ""

    @property
    def is_terminal(self) -> bool:
        return self._terminal

    def line(self, text: str) -> None:
        self.clear()
        print(text, file=self._stream, flush=True)

    def progress(self, text: str) -> None:
        """Replace the line that changes in place, cut to what the terminal shows."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if self._terminal and text != self._shown:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._shown = text

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = ""


def seconds(value: float) -> str:
    """A duration as people say it; one across which the clock was set back is none."""
    value = max(value, 0.0)
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def describe_progress(
    progress: dict[str, Any] | None, started: float, warnings: "Iterable[Symptom]" = ()
) -> str:
    """Step, rate, time left and the numbers that matter, from a job's progress.json.

    Warnings come first: a narrow terminal cuts the end.
    """
    if not progress:
        return "starting"
    done, total = progress["done"], progress["total"]
    elapsed = max(progress["time"] - started, 1e-9)
    rate = done / elapsed
    left = seconds((total - done) / rate) if rate and total > done else ""
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in progress["numbers"].items())
    parts = [f"{done}/{total}", f"{rate:.1f}/s", f"{left} left" if left else "", numbers]
    return "  ".join(part for part in [describe_warnings(warnings), *parts] if part)


def describe_warnings(warnings: "Iterable[Symptom]") -> str:
    """Marks for a line that has no room for more."""
    return "  ".join(f"! {symptom.kind.words}" for symptom in warnings)


_TELLING = (
    "accuracy",
    "pairwise_accuracy",
    "reward_mean",
    "kl_to_reference",
    "entropy",
    "accuracy_gain",
    "loss",
    "response_length",
)


def describe_metrics(metrics: dict[str, Any], most: int = 4) -> str:
    """The few numbers that tell most about a stage."""
    chosen = [name for name in _TELLING if name in metrics] or list(metrics)
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in chosen[:most])


def ago(when: float) -> str:
    return f"{seconds(max(time.time() - when, 0))} ago"
