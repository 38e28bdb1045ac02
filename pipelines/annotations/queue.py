"""The queue: `annotations/queue.jsonl`, the pairs that people are asked about.

It is only appended to; where a pair is there twice, the later line counts. Every pair goes to as
many annotators as it asks for, pairs that somebody has begun first, then each annotator's in an
order of their own, so that two who work at the same time rarely meet at one pair. A skip is not
asked again of the same person, and leaves the pair to others.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.annotations import store
from pipelines.annotations.json_lines import append_line, damaged, read_lines
from pipelines.annotations.judgement import Choice, Judgement, annotator_name, as_line, from_line
from pipelines.annotations.pair import Pair
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from stages.data.seeds import stable_hash


@dataclass(frozen=True)
class Extended:
    """What became of pairs that were drawn."""

    num_added: int
    num_there: int
    """In the queue already, for as many annotators."""
    num_raised: int
    """In the queue already; now for more annotators."""


@dataclass(frozen=True)
class Progress:
    """How far one annotator is."""

    num_judged: int
    num_left: int
    """That this annotator is still asked about."""
    num_pairs: int


def queue_file(root: Path) -> Path:
    return root / store.FOLDER / "queue.jsonl"


def read_queue(root: Path, notes: list[str] | None = None) -> dict[str, Pair]:
    """The pairs by id, in the order in which they were added; what was cut off goes to notes."""
    path = queue_file(root)
    pairs: dict[str, Pair] = {}
    for number, value in read_lines(path, [] if notes is None else notes):
        try:
            pair: Pair = from_line(json.dumps(value), Pair)
            pairs[pair.id] = pair
        except (ValueError, AssertionError) as error:
            raise damaged(path, number, str(error) or "it has no origin.pair") from None
    return pairs


def extend(root: Path, pairs: Sequence[Pair], num_annotators: int) -> Extended:
    """Add pairs, each for this many annotators."""
    path = queue_file(root)
    added = raised = 0
    with hold_lock(path, wait=True):
        there = read_queue(root)
        for pair in pairs:
            known = there.get(pair.id)
            if known is not None and known.num_annotators >= num_annotators:
                continue
            append_line(path, as_line(replace(known or pair, num_annotators=num_annotators)))
            added += known is None
            raised += known is not None
    return Extended(added, len(pairs) - added - raised, raised)


def next_pair(root: Path, annotator: str) -> tuple[Pair | None, Progress]:
    """What to ask this annotator now; None: nothing is left."""
    name = annotator_name(annotator)
    pairs = read_queue(root)
    said = by_pair(store.read(root).judgements)
    mine = {pair_id for pair_id, judged in said.items() if any(j.annotator == name for j in judged)}

    def num_opinions(pair: Pair) -> int:
        return sum(judged.chosen is not Choice.SKIP for judged in said.get(pair.id, ()))

    left = [
        pair
        for pair in pairs.values()
        if pair.id not in mine and num_opinions(pair) < pair.num_annotators
    ]
    left.sort(key=lambda pair: (-num_opinions(pair), stable_hash("turn", name, pair.id)))
    progress = Progress(len(mine & pairs.keys()), len(left), len(pairs))
    return (left[0] if left else None), progress


def judge(root: Path, annotator: str, pair_id: str, chosen: Choice, note: str = "") -> Judgement:
    """Keep what an annotator says of a pair; AlreadyJudged where that was said before."""
    pair = read_queue(root).get(pair_id)
    if pair is None:
        raise LockstepError(
            f"{queue_file(root)} has no pair {pair_id!r}: load the page again for another one"
        )
    return store.append(root, pair.judged(annotator_name(annotator), chosen, note))


def by_pair(judgements: Iterable[Judgement]) -> dict[str, list[Judgement]]:
    """Judgements of the same two texts; one that was shown alone goes by its own id."""
    groups: dict[str, list[Judgement]] = defaultdict(list)
    for judgement in judgements:
        groups[judgement.origin.pair or judgement.id].append(judgement)
    return dict(groups)
