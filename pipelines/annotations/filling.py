"""`lockstep annotate queue`: draw pairs from what is recorded, and add them to the queue."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipelines.annotations.candidates import of_policies, of_rollouts
from pipelines.annotations.draw import Strategy, draw
from pipelines.annotations.queue import Extended, extend, read_queue
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository


@dataclass(frozen=True)
class Wanted:
    """What a user asked for: rollouts of iterations, or two policies."""

    iterations: tuple[str, ...]
    policies: tuple[str, ...]
    strategy: str
    num_pairs: int
    num_annotators: int
    seed: int


@dataclass(frozen=True)
class Filled:
    """What was drawn, and what became of it."""

    extended: Extended
    num_candidates: int
    """Pairs that could have been drawn."""
    num_drawn: int
    num_pairs: int
    """In the queue now."""
    left_out: Mapping[str, int]
    """Responses that no pair has, by reason."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("extended"), **values}


def fill(repository: Repository, wanted: Wanted) -> Filled:
    """Draw and add; LockstepError where that is not possible."""
    strategy = _checked(wanted)
    if wanted.policies:
        candidates = of_policies(repository, wanted.policies)
    else:
        candidates = of_rollouts(repository, wanted.iterations)
    drawn = draw(candidates.pairs, strategy, wanted.seed, wanted.num_pairs)
    how = f"{strategy}, seed {wanted.seed}"
    pairs = [replace(pair, drawn=how) for pair in drawn]
    extended = extend(repository.root, pairs, wanted.num_annotators)
    return Filled(
        extended,
        len({pair.id for pair in candidates.pairs}),
        len(drawn),
        len(read_queue(repository.root)),
        dict(candidates.left_out),
        tuple(candidates.notes),
    )


def _checked(wanted: Wanted) -> Strategy:
    if bool(wanted.iterations) == bool(wanted.policies):
        raise LockstepError(
            "name either iterations (`lockstep annotate queue iter_001`) or two policies "
            "(`--policies sft,iter_003`)"
        )
    if wanted.policies and len(wanted.policies) != 2:
        raise LockstepError(
            f"--policies takes two, such as sft,iter_003, not {len(wanted.policies)}"
        )
    for option, value in (("-n", wanted.num_pairs), ("--annotators", wanted.num_annotators)):
        if value < 1:
            raise LockstepError(f"{option} is a number from 1 up, not {value}")
    names = [strategy.value for strategy in Strategy]
    if wanted.strategy not in names:
        near = difflib.get_close_matches(wanted.strategy, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LockstepError(f"--strategy {wanted.strategy!r} is none of {', '.join(names)}{hint}")
    return Strategy(wanted.strategy)


def render(filled: Filled) -> str:
    """For people."""
    extended = filled.extended
    lines = [
        f"{extended.num_added} pairs added to the queue, which has {filled.num_pairs} now; "
        f"{filled.num_drawn} of {filled.num_candidates} were drawn"
    ]
    if extended.num_there:
        lines.append(f"{extended.num_there} of them were there already")
    if extended.num_raised:
        lines.append(f"{extended.num_raised} were there already, and now go to more annotators")
    lines += [f"left out: {number} responses {why}" for why, number in filled.left_out.items()]
    return "\n".join([*lines, *filled.notes, "judge them on the Annotate page of `lockstep ui`"])
