"""The verifier: whether a response is right, 1.0 or 0.0.

verifier.json holds the rule. The answer is the response's text after the last `after` (all of it
where `after` is null), without surrounding space; it is right when it equals the expected one. A
response that was cut before it ended is wrong.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.data.artifacts import write_json


@dataclass(frozen=True)
class Verifier:
    """The rule."""

    after: str | None = None
    """The answer follows the last occurrence of this; null: the whole response is the answer."""

    @classmethod
    def load(cls, folder: Path) -> "Verifier":
        rule = json.loads((folder / "verifier.json").read_text(encoding="utf-8"))
        return cls(after=rule["after"])

    def save(self, folder: Path) -> None:
        write_json(folder / "verifier.json", {"rule": "exact_match", **asdict(self)})

    def reward(self, response: str, answer: str, *, ended: bool = True) -> float:
        return float(ended and self.given(response) == answer.strip())

    def given(self, response: str) -> str:
        """The answer that a response gives."""
        given = response if self.after is None else response.rsplit(self.after, 1)[-1]
        return given.strip()


def pairwise_accuracy(scores: Iterable[tuple[float, float]]) -> float | None:
    """Share of (chosen, rejected) scores that chosen wins; a tie counts half; None of no pairs."""
    wins = [1.0 if chosen > rejected else 0.5 * (chosen == rejected) for chosen, rejected in scores]
    return sum(wins) / len(wins) if wins else None
