"""The texts that everything is learnt from, whatever their source, each with the place to point at.

Held-out prompts are in no training set: the arithmetic task is split by problem, and in a user's
files an overlap is an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.context import StageError
from stages.contracts.prepare import PrepareParams
from stages.data import arithmetic
from stages.data.jsonl import NUMBER, NUMBERS, TEXTS, Row, read_jsonl
from stages.data.seeds import shuffled


@dataclass(frozen=True)
class Example:
    """A prompt, and where there is one its completion or its right answer."""

    prompt: str
    place: str
    completion: str = ""
    answer: str | None = None
    extra: str = "{}"
    """What else the source says of it, as a JSON object."""


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt, the first preferred."""

    prompt: str
    place: str
    chosen: str
    rejected: str
    answer: str | None = None
    margin: float | None = None
    """By how much the first is better, where the source says so."""


@dataclass(frozen=True)
class Rated:
    """A response with a rating."""

    prompt: str
    place: str
    completion: str
    rating: float


@dataclass(frozen=True)
class Labelled:
    """A response in steps, each right (1) or wrong (0)."""

    prompt: str
    place: str
    steps: list[str]
    labels: list[float]


@dataclass(frozen=True)
class Corpus:
    """All texts of a run."""

    demonstrations: list[Example]
    preferences: list[Pair]
    feedback: list[Rated]
    steps: list[Labelled]
    prompts: list[Example]
    held_out: list[Example]
    held_out_preferences: list[Pair]
    answer_after: str | None
    """What the answer follows in a response; None where the whole response is the answer."""

    def texts(self) -> Iterator[str]:
        """Every text in it."""
        for example in (*self.demonstrations, *self.prompts, *self.held_out):
            yield from (example.prompt, example.completion, example.answer or "")
        for pair in (*self.preferences, *self.held_out_preferences):
            yield from (pair.prompt, pair.chosen, pair.rejected)
        for rated in self.feedback:
            yield from (rated.prompt, rated.completion)
        for labelled in self.steps:
            yield from (labelled.prompt, *labelled.steps)


def arithmetic_corpus(params: PrepareParams, seed: int) -> Corpus:
    """The addition task, its problems split into held-out ones and the rest."""
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
    asked = arithmetic.draw(rest, params.prompts, seed, "prompts")
    preferences = _pairs(compared, seed, "train")
    return Corpus(
        demonstrations=[
            Example(p.prompt, p.prompt, completion, p.answer)
            for p, completion in zip(shown, completions, strict=True)
        ],
        preferences=preferences,
        feedback=_both_sides(preferences),
        steps=[
            _labelled(pair, text) for pair in preferences for text in (pair.chosen, pair.rejected)
        ],
        prompts=[Example(p.prompt, p.prompt, answer=p.answer) for p in asked],
        held_out=[Example(p.prompt, p.prompt, answer=p.answer) for p in held_out],
        held_out_preferences=_pairs(held_out, seed, "held_out"),
        answer_after=arithmetic.ANSWER_AFTER,
    )


def _pairs(problems: Iterable[arithmetic.Problem], seed: int, split: str) -> list[Pair]:
    return [
        Pair(
            prompt=problem.prompt,
            place=problem.prompt,
            chosen=arithmetic.worked(problem),
            rejected=arithmetic.rejected(problem, seed, f"{split} {index}"),
            answer=problem.answer,
        )
        for index, problem in enumerate(problems)
    ]


def _both_sides(pairs: Iterable[Pair]) -> list[Rated]:
    """The responses of pairs one by one, the preferred ones rated 1 and the others 0."""
    return [
        Rated(pair.prompt, pair.place, text, rating)
        for pair in pairs
        for text, rating in ((pair.chosen, 1.0), (pair.rejected, 0.0))
    ]


def _labelled(pair: Pair, text: str) -> Labelled:
    """A working in its steps; one is right where it is that of the right working."""
    right, given = arithmetic.steps(pair.chosen), arithmetic.steps(text)
    labels = [float(step == expected) for step, expected in zip(given, right, strict=True)]
    return Labelled(pair.prompt, pair.place, given, labels)


def files_corpus(folder: Path) -> Corpus:
    """A user's JSON lines; StageError names what is wrong with them by file and line."""
    demonstrations = read_jsonl(
        folder / "demonstrations.jsonl", ["prompt", "completion"], ["answer"]
    )
    pair_columns = ["prompt", "chosen", "rejected"]
    preferences = read_jsonl(
        folder / "preferences.jsonl", pair_columns, ["answer", "margin"], {"margin": NUMBER}
    )
    pairs = [_pair(row) for row in preferences]
    feedback = _optional(folder / "feedback.jsonl", ["prompt", "completion", "rating"])
    steps = _optional(folder / "steps.jsonl", ["prompt", "steps", "labels"])
    prompts = read_jsonl(folder / "prompts.jsonl", ["prompt"], ["answer"])
    held_out = read_jsonl(folder / "held_out.jsonl", ["prompt", "answer"])
    held_out_preferences = read_jsonl(
        folder / "held_out_preferences.jsonl", pair_columns, ["answer"]
    )
    _refuse_overlap(
        (demonstrations, preferences, prompts, feedback, steps), (held_out, held_out_preferences)
    )
    answers = {row.values["prompt"]: row.values["answer"] for row in held_out}
    return Corpus(
        demonstrations=[_example(row) for row in demonstrations],
        preferences=pairs,
        feedback=[_rated(row) for row in feedback] if feedback else _both_sides(pairs),
        steps=[_in_steps(row) for row in steps],
        prompts=[_example(row) for row in prompts],
        held_out=[_example(row) for row in held_out],
        held_out_preferences=[_pair(row, answers) for row in held_out_preferences],
        answer_after=None,
    )


def _example(row: Row) -> Example:
    values = row.values
    completion, answer = values.get("completion", ""), values.get("answer")
    return Example(values["prompt"], row.place, completion, answer, row.extra)


def _optional(path: Path, required: list[str]) -> list[Row]:
    """The rows of a file that need not be there."""
    kinds = {"rating": NUMBER, "steps": TEXTS, "labels": NUMBERS}
    return read_jsonl(path, required, kinds=kinds) if path.exists() else []


def _rated(row: Row) -> Rated:
    values = row.values
    return Rated(values["prompt"], row.place, values["completion"], float(values["rating"]))


def _in_steps(row: Row) -> Labelled:
    values = row.values
    if len(values["steps"]) != len(values["labels"]) or not all(values["steps"]):
        raise StageError(
            f"{row.place} has {len(values['steps'])} steps and {len(values['labels'])} labels: "
            "write one label for each step, and no empty step"
        )
    labels = [float(label) for label in values["labels"]]
    if not all(0 <= label <= 1 for label in labels):
        raise StageError(
            f"{row.place}: a label is 1 or true for a right step, 0 or false otherwise"
        )
    return Labelled(values["prompt"], row.place, values["steps"], labels)


def _pair(row: Row, answers: dict[str, str] | None = None) -> Pair:
    values = row.values
    answer = values.get("answer", (answers or {}).get(values["prompt"]))
    return Pair(
        values["prompt"],
        row.place,
        values["chosen"],
        values["rejected"],
        answer,
        None if values.get("margin") is None else float(values["margin"]),
    )


def _refuse_overlap(training: Iterable[list[Row]], held_out: Iterable[list[Row]]) -> None:
    seen = {row.values["prompt"]: row for rows in training for row in rows}
    for rows in held_out:
        for row in rows:
            if row.values["prompt"] in seen:
                trained_on = seen[row.values["prompt"]].place
                raise StageError(
                    f"{row.place} holds out the prompt of {trained_on}: what is trained on "
                    "measures nothing. Remove it from one of the two."
                )
