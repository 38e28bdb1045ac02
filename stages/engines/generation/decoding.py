"""Continuous batching: a slot whose sequence has ended takes the next request.

The host says which request goes into which slot; what has ended it learns from a look at the slots
every few steps, and on a GPU the look is one round old, so that the GPU never waits for the host.
Which look is acted on at which step is fixed, so results depend on the requests and the number of
slots alone, not on how fast anything is.

A sequence begins as its prompt without the last token, in the cache; that token is its first input
to a decode step. Slots in use are kept together at the front, so that a step computes few others.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from stages.engines.generation.generator import Request

REFILL = 16
"""New requests are taken up when a 16th of the slots is free: few prefills, few idle slots."""
Look = Callable[[], Sequence[int]]
"""Waits for a look and reads it: by slot the request that is decoded there, or, of a request that
has ended, its complement `~request`."""


class SlotDecoder(Protocol):
    """A model with a cache of so many slots, and what its sequences have come to."""

    slots: int
    steps_a_look: int
    looks_late: int
    """How many looks lie between the one that is taken and the one that is read."""

    def rows_for(self, num_slots: int) -> int:
        """How many slots a step computes to advance the first so many."""

    def admit(self, requests: Mapping[int, int]) -> None:
        """Begin a request in each of these slots."""

    def move(self, targets: Mapping[int, int]) -> None:
        """Move the sequences of some slots to others."""

    def advance(self, num_rows: int, num_steps: int) -> None:
        """Decode a token for each sequence in the first slots, several times."""

    def look(self) -> Look: ...


def decode(decoder: SlotDecoder, requests: Sequence[Request], max_new_tokens: int) -> None:
    """Advance every request to its end."""
    # Neighbours of one length waste little in prefill; the longest go first.
    waiting = deque(
        sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids), reverse=True)
    )
    busy: dict[int, int] = {}
    last_step: dict[int, int] = {}
    looks: deque[Look] = deque()
    step = 0
    refill = max(1, decoder.slots // REFILL)
    while waiting or busy:
        free = [slot for slot in range(decoder.slots) if slot not in busy]
        if waiting and len(free) >= min(refill, len(waiting)):
            admitted = {slot: waiting.popleft() for slot in free[: len(waiting)]}
            decoder.admit(admitted)
            busy |= admitted
            last_step |= {i: step + requests[i].limit(max_new_tokens) for i in admitted.values()}
        elif not waiting and decoder.rows_for(len(busy)) < decoder.rows_for(1 + max(busy)):
            outside = sorted(slot for slot in busy if slot >= len(busy))
            targets = dict(zip(outside, free[: len(outside)], strict=True))
            decoder.move(targets)
            busy = {targets.get(slot, slot): request for slot, request in busy.items()}
        num_steps = min(
            decoder.steps_a_look, max(last_step[request] for request in busy.values()) - step
        )
        decoder.advance(decoder.rows_for(1 + max(busy)), num_steps)
        step += num_steps
        looks.append(decoder.look())
        seen = looks.popleft()() if len(looks) > decoder.looks_late else ()
        # An old look at a slot may show the sequence that was there before.
        ended = {slot for slot, shown in enumerate(seen) if shown < 0 and busy.get(slot) == ~shown}
        busy = {
            slot: request
            for slot, request in busy.items()
            if slot not in ended and last_step[request] > step
        }
