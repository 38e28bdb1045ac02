"""The arithmetic task as the rows of each role, made from the seed.

Held-out prompts are in no training set: the task is split by problem.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from stages.context import StageError
from stages.contracts.prepare import PrepareParams
from stages.contracts.sources import Role
from stages.data import arithmetic
from stages.data.dialogue import asked, reply
from stages.data.items import Demonstration, Example, Labelled, Pair, Place, Rated
from stages.data.seeds import shuffled
from stages.data.tally import Tally


class Corpus(Protocol):
    """All rows of a run, whatever their source."""

    tally: Tally
    unused: Sequence[str]
    """Files of rows that nothing reads."""

    answer_after: str | None
    """What the answer follows in a response; None where the whole response is the answer."""

    def texts(self) -> Iterator[str]:
        """Every text in it."""

    def rows(self, role: Role) -> Iterator[Example]:
        """The rows of a role that are used."""


class ArithmeticCorpus:
    """The addition task, its problems split into held-out ones and the rest."""

    answer_after: str | None = arithmetic.ANSWER_AFTER
    unused: Sequence[str] = ()

    def __init__(self, params: PrepareParams, seed: int) -> None:
        self.tally = Tally()
        self._rows = _rows(params, seed)

    def texts(self) -> Iterator[str]:
        for items in self._rows.values():
            for item in items:
                yield from item.texts()

    def rows(self, role: Role) -> Iterator[Example]:
        counts = self.tally.of(role, arithmetic.NAME)
        counts.format = counts.source
        for item in self._rows[role]:
            counts.num_read += 1
            yield item


def _rows(params: PrepareParams, seed: int) -> dict[Role, Sequence[Example]]:
    problems = arithmetic.unordered_problems(params.digits)
    order = shuffled(len(problems), seed, "held_out")
    held_out = [problems[index] for index in order[: params.held_out]]
    rest = [problems[index] for index in order[params.held_out :]]
    if params.prompts > len(rest):
        raise StageError(
            f"prepare.prompts is {params.prompts}, but {params.digits} digits leave {len(rest)} "
            "problems beside the held-out ones: lower prepare.prompts or raise prepare.digits"
        )
    shown = arithmetic.draw(rest, params.demonstrations, seed, "demonstrations")
    completions = arithmetic.demonstrations(shown, params.demonstration_accuracy, seed)
    held_out = arithmetic.draw(held_out, params.held_out, seed, "held_out_order")
    compared = arithmetic.draw(rest, params.preferences, seed, "preferences")
    drawn = arithmetic.draw(rest, params.prompts, seed, "prompts")
    preferences = _pairs(compared, seed, "train")
    return {
        Role.DEMONSTRATIONS: [
            Demonstration(
                place=_place(index),
                prompt=asked(problem.prompt),
                answer=problem.answer,
                completion=[reply(completion)],
            )
            for index, (problem, completion) in enumerate(zip(shown, completions, strict=True))
        ],
        Role.PREFERENCES: preferences,
        Role.FEEDBACK: [
            Rated(place=pair.place, prompt=pair.prompt, completion=side, rating=rating)
            for pair in preferences
            for side, rating in ((pair.chosen, 1.0), (pair.rejected, 0.0))
        ],
        Role.STEPS: [
            _labelled(pair, side["content"])
            for pair in preferences
            for side in (pair.chosen, pair.rejected)
        ],
        Role.PROMPTS: _prompts(drawn),
        Role.HELD_OUT: [
            replace(example, extra={"task": problem.task})
            for example, problem in zip(_prompts(held_out), held_out, strict=True)
        ],
        Role.HELD_OUT_PREFERENCES: _pairs(held_out, seed, "held_out"),
    }


def _place(index: int) -> Place:
    return Place(arithmetic.NAME, index + 1)


def _prompts(problems: Iterable[arithmetic.Problem]) -> list[Example]:
    return [
        Example(place=_place(index), prompt=asked(problem.prompt), answer=problem.answer)
        for index, problem in enumerate(problems)
    ]


def _pairs(problems: Iterable[arithmetic.Problem], seed: int, split: str) -> list[Pair]:
    return [
        Pair(
            place=_place(index),
            prompt=asked(problem.prompt),
            answer=problem.answer,
            chosen=reply(arithmetic.worked(problem)),
            rejected=reply(arithmetic.rejected(problem, seed, f"{split} {index}")),
        )
        for index, problem in enumerate(problems)
    ]


def _labelled(pair: Pair, text: str) -> Labelled:
    """A working in its steps; one is right where it is that of the right working."""
    right, given = arithmetic.steps(pair.chosen["content"]), arithmetic.steps(text)
    labels = [float(step == expected) for step, expected in zip(given, right, strict=True)]
    return Labelled(place=pair.place, prompt=pair.prompt, steps=given, labels=labels)
