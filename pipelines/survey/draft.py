"""A profile before it is written: settings, each with its reason, and remarks for its head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One line of a profile. `is_advice`: written as a comment, for the user to enable."""

    key: str
    value: str | int | float | None
    why: str = ""
    is_advice: bool = False

    @property
    def number(self) -> int:
        assert isinstance(self.value, int), self
        return self.value

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "why": self.why, "advice": self.is_advice}


@dataclass(frozen=True)
class Draft:
    description: str
    remarks: tuple[str, ...]
    """What to know about the cluster: a paragraph each."""
    top: tuple[Setting, ...]
    defaults: tuple[Setting, ...]
    stages: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "description": self.description,
            "remarks": list(self.remarks),
            "top": [each.as_json() for each in self.top],
            "defaults": [each.as_json() for each in self.defaults],
            "stages": {
                stage: [each.as_json() for each in settings]
                for stage, settings in self.stages.items()
            },
        }
