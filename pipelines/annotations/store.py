"""The judgements of a clone: `annotations/judgements/ANNOTATOR.jsonl`, one file per annotator.

Nothing is ever rewritten: a judgement that is taken back gets a later line that says so. A line is
appended under a lock and flushed to disk before anybody hears of it.

The folder lies outside `prepare.folder`, so judging makes no stage stale.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.annotations.json_lines import append_line, damaged, read_lines
from pipelines.annotations.judgement import (
    Judgement,
    Withdrawal,
    annotator_name,
    as_line,
    checked,
    from_line,
)
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock

FOLDER = "annotations"


class AlreadyJudged(LockstepError):
    """The annotator has judged this pair of the queue before, perhaps in another tab."""


@dataclass(frozen=True)
class Annotations:
    """What all annotators have said."""

    judgements: tuple[Judgement, ...]
    """Those that stand, in the order of time."""
    num_withdrawn: int
    notes: tuple[str, ...]
    """What was cut off, and where."""


def judgements_folder(root: Path) -> Path:
    return root / FOLDER / "judgements"


def append(root: Path, judgement: Judgement) -> Judgement:
    """Keep a judgement; returns it as it is kept.

    Said again, word for word and with the same time, it is kept once.
    """
    judgement = checked(judgement)
    path = _file_of(root, judgement.annotator)
    with hold_lock(path, wait=True):
        standing, _, _ = _standing(path)
        if judgement.id in standing:
            return judgement
        pair = judgement.origin.pair
        if pair is not None and any(other.origin.pair == pair for other in standing.values()):
            raise AlreadyJudged(
                f"{judgement.annotator} has judged pair {pair} already: withdraw that judgement "
                "first, or go on to the next pair"
            )
        append_line(path, as_line(judgement))
    return judgement


def withdraw(root: Path, annotator: str, judgement_id: str) -> Judgement:
    """Take a judgement back; returns it. It stays in the file, and counts no more."""
    name = annotator_name(annotator)
    path = _file_of(root, name)
    if not path.exists():
        raise LockstepError(f"{path} does not exist: {name} has judged nothing")
    with hold_lock(path, wait=True):
        standing, _, _ = _standing(path)
        if judgement_id not in standing:
            raise LockstepError(
                f"{path} has no judgement {judgement_id!r} that stands: it was withdrawn before, "
                "or somebody else's"
            )
        append_line(path, as_line(Withdrawal(judgement=judgement_id, annotator=name)))
    return standing[judgement_id]


def read(root: Path) -> Annotations:
    """Everything that stands; LockstepError names a file and line that cannot be read."""
    judgements: list[Judgement] = []
    notes: list[str] = []
    num_withdrawn = 0
    for path in sorted(judgements_folder(root).glob("*.jsonl")):
        standing, withdrawn, torn = _standing(path)
        judgements += standing.values()
        num_withdrawn += withdrawn
        notes += torn
    judgements.sort(key=lambda judgement: (judgement.time, judgement.id))
    return Annotations(tuple(judgements), num_withdrawn, tuple(notes))


def _file_of(root: Path, name: str) -> Path:
    return judgements_folder(root) / f"{name}.jsonl"


def _standing(path: Path) -> tuple[dict[str, Judgement], int, list[str]]:
    """A file's judgements by id, how many were withdrawn, and what was cut off."""
    standing: dict[str, Judgement] = {}
    num_withdrawn = 0
    notes: list[str] = []
    for number, value in read_lines(path, notes):
        entry = _entry(path, number, value)
        if entry.annotator != path.stem:
            raise LockstepError(
                f"{path} line {number} is of {entry.annotator!r}: each annotator's judgements are "
                "in a file of their own; move it there"
            )
        if isinstance(entry, Judgement):
            standing[entry.id] = entry
        elif standing.pop(entry.judgement, None) is not None:
            num_withdrawn += 1
    return standing, num_withdrawn, notes


def _entry(path: Path, number: int, value: Any) -> Judgement | Withdrawal:
    kind = Withdrawal if value.get("kind") == "withdrawal" else Judgement
    try:
        entry: Judgement | Withdrawal = from_line(json.dumps(value), kind)
    except ValueError as error:
        raise damaged(path, number, str(error)) from None
    return entry
