"""The labels of a classifier, and which of them is meant."""

import json
from pathlib import Path

from stages.context import StageError


def labels_of(folder: Path) -> dict[int, str]:
    """The name of each label, by its number; a config that says nothing means two."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    return {int(number): str(name) for number, name in named.items()}


def choose_label(where: str, wanted: int | str | None, names: dict[int, str]) -> int:
    """The number of the label that is wanted; its only one where none is named."""
    shown = ", ".join(f"{index} ({name})" for index, name in sorted(names.items()))
    if wanted is None:
        if len(names) == 1:
            return 0
        raise StageError(f"{where} has {len(names)} labels, {shown}: say which by `label`")
    matches = [i for i, name in names.items() if wanted in (i, name)]
    if not matches:
        raise StageError(f"{where} has no label {wanted!r}; it has {shown}")
    return matches[0]
