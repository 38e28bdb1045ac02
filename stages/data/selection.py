"""Row selection: which rows of the sources are used, and how often.

No training set has an answer to a held-out prompt, not even as one turn of a longer dialogue. Where
a role has no held-out source, some of its prompts are split off: those whose hash is lowest, so
that the order of the rows changes nothing. A prompt counts as held out when it differs from one
that is in case, whitespace, punctuation, encoding or system message alone. Every row that is left
out is counted, with the reason.

What is kept in memory of a row is a digest, some 50 bytes, and for held-out prompts one more.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.contracts.prepare import Duplicates, PrepareParams, Unfit
from stages.contracts.sources import Role
from stages.data.dialogue import digest
from stages.data.items import Example
from stages.data.seeds import SEED_BITS, stable_hash
from stages.data.seen import Seen
from stages.data.sources import Opened, read, sources_of, unreadable, unused_files
from stages.data.tally import Dropped, RowCounts, Tally

SPLIT_OFF = {
    Role.HELD_OUT: Role.PROMPTS,
    Role.HELD_OUT_PREFERENCES: Role.PREFERENCES,
}


class FilesCorpus:
    """A user's data, streamed."""

    answer_after: str | None = None
    """The whole response is the answer."""

    def __init__(self, params: PrepareParams, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._params = params
        self._seed = seed
        self._sources = sources_of(params, folder)
        self.unused: Sequence[str] = unused_files(self._sources, folder)
        self._split = {
            role: self._split_off(role, origin)
            for role, origin in SPLIT_OFF.items()
            if params.held_out and self._sources[origin] and not self._sources[role]
        }
        self._held_out = Seen()
        for role in SPLIT_OFF:
            for item in self._all(role, Tally()):
                self._held_out.add(item.prompt_digest)

    def texts(self) -> Iterator[str]:
        """Every text in it."""
        for role in Role:
            for item in self._all(role, Tally()):
                yield from item.texts()

    def rows(self, role: Role) -> Iterator[Example]:
        """The rows of a role that are used."""
        origin = SPLIT_OFF[role] if role in self._split else role
        seen = Seen()
        for opened in self._sources[origin]:
            counts = self.tally.of(role, opened.label)
            split_off = RowCounts(origin, opened.label)
            for item in read(opened, origin, self._params, split_off if role != origin else counts):
                if role != origin:
                    if item.prompt_digest not in self._split[role]:
                        continue
                    counts.num_read += 1
                if role is Role.HELD_OUT and not _is_name(item.extra.get("task")):
                    wrong = (
                        f"'task' is {item.extra['task']!r}: write text in quotes, or leave it out"
                    )
                    unreadable(item.place, wrong, self._params, counts)
                    continue
                # Weights are of training sets: as many are held out as were asked for.
                copies = self._copies(opened, item) if role == origin else 1
                why = self._unused(role, item, seen, drawn=copies > 0)
                if why:
                    counts.dropped[why] += 1
                else:
                    yield item if copies == 1 else replace(item, copies=copies)
            if role != origin:
                counts.format = split_off.format

    def _unused(self, role: Role, item: Example, seen: Seen, *, drawn: bool) -> Dropped | None:
        """Why a row is left out. One that is not drawn leaves its place to a copy elsewhere."""
        if not role.is_held_out and item.prompt.messages:
            for prompt in item.answered_digests():
                if any(prompt in split for split in self._split.values()):
                    return Dropped.HELD_OUT
                if prompt in self._held_out:
                    self._refuse_contamination(item, prompt)
                    return Dropped.CONTAMINATED
        same = self._what_counts_as_same(role, item)
        if same is not None and same in seen:
            return Dropped.DUPLICATE
        if not drawn:
            return Dropped.NOT_DRAWN
        if same is not None:
            seen.add(same)
        return None

    def _what_counts_as_same(self, role: Role, item: Example) -> bytes | None:
        duplicates = self._params.duplicates
        if duplicates is Duplicates.NORMALISED:
            return item.normalised_digest
        if role.asks:  # rollouts and evaluations go by the prompt: it is there once
            return digest(item.prompt.id)
        return item.digest if duplicates is Duplicates.EXACT else None

    def _copies(self, opened: Opened, item: Example) -> int:
        """Whole passes, and one more for the share of rows that the fraction asks for.

        Copies in one source are drawn together where one of them is kept, or a row that is there
        often would be kept more often.
        """
        weight = opened.source.weight
        line = item.place.line if self._params.duplicates is Duplicates.KEEP else 0
        draw = stable_hash(self._seed, "weight", item.place.source, line, item.row_id)
        return int(weight) + int(draw < (weight % 1) * 2**SEED_BITS)

    def _refuse_contamination(self, item: Example, prompt: bytes) -> None:
        if self._params.contamination is Unfit.DROP:
            return
        places = (
            other.place
            for role in SPLIT_OFF
            for other in self._all(role, Tally())
            if other.prompt_digest == prompt
        )
        raise StageError(
            f"{next(places)} holds out the prompt of {item.place}: what is trained on measures "
            "nothing. Remove it from one of the two, or set prepare.contamination to drop"
        )

    def _split_off(self, role: Role, origin: Role) -> frozenset[bytes]:
        """The prompts of a role that are held out: those with the lowest hashes."""
        wanted, prompts = self._params.held_out, Seen()
        lowest: list[tuple[int, bytes]] = []
        for item in self._all(origin, Tally()):
            prompt = item.prompt_digest
            if prompts.add(prompt):
                # The largest of those kept is first out.
                entry = (-stable_hash(self._seed, "held_out", prompt.hex()), prompt)
                if len(lowest) < wanted:
                    heapq.heappush(lowest, entry)
                else:
                    heapq.heappushpop(lowest, entry)
        if len(prompts) < 2 * wanted:
            raise StageError(
                f"there is no source of {role}, so prepare.held_out {wanted} prompts are to be "
                f"split off the {origin}, which have only {len(prompts)} different ones: lower "
                f"prepare.held_out (0 splits nothing off), or add a source of {role}"
            )
        return frozenset(prompt for _, prompt in lowest)

    def _all(self, role: Role, tally: Tally) -> Iterator[Example]:
        for opened in self._sources[role]:
            yield from read(opened, role, self._params, tally.of(role, opened.label))


def _is_name(task: Any) -> bool:
    """Whether evaluations can go by it."""
    return task is None or (isinstance(task, str) and bool(task))
