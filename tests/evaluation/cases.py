"""Answers of two policies to six prompts, small enough to work every number out by hand."""

from stages.evaluation.answers import Answer, Answered


def answer(
    reward: float,
    correct: bool | None = None,
    *,
    length: int = 10,
    text: str = "",
    vote: str | None = None,
    ended: bool = True,
) -> Answer:
    response = text or f"rewarded {reward}, {length} long"
    return Answer(response, "stop" if ended else "length", length, reward, correct, vote)


def answered(
    name: str, greedy: Answer, *sampled: Answer, task: str | None = None, expected: str | None = "4"
) -> Answered:
    return Answered(name, f"prompt {name}", expected, task, greedy, sampled)


RIGHT, WRONG = True, False


def votes(*drawn: tuple[float, bool, str | None]) -> list[Answer]:
    """Samples by reward, correctness and vote; one that abstains was cut."""
    return [answer(reward, ok, vote=vote, ended=vote is not None) for reward, ok, vote in drawn]


POLICY = [
    answered(
        "a",
        answer(2.0, RIGHT, length=10),
        *votes((1.0, RIGHT, "4"), (2.0, WRONG, "5"), (3.0, WRONG, "5")),
        task="sums",
    ),
    answered(
        "b",
        answer(0.0, WRONG, length=8),
        *votes((0.0, WRONG, "5"), (0.0, WRONG, "6"), (1.0, RIGHT, "4")),
        task="sums",
    ),
    answered(
        "c",
        answer(1.0, RIGHT, length=20),
        *votes((1.0, RIGHT, "4"), (1.5, RIGHT, "4"), (2.5, RIGHT, "4")),
        task="sums",
    ),
    answered(
        "d",
        answer(0.5, WRONG, length=7),
        *votes((0.0, WRONG, None), (0.0, WRONG, None), (1.0, RIGHT, "4")),
        task="words",
    ),
    # No answer to compare with.
    answered(
        "e", answer(5.0, length=30), *map(answer, (4.0, 4.0, 6.0)), task="words", expected=None
    ),
    answered("f", answer(1.0, RIGHT), *[answer(0.0, WRONG)] * 3),
]
REFERENCE = [
    # Lower: won. 10 and 8 differ by exactly a fifth of the longer: similar.
    answered("a", answer(1.0, RIGHT, length=8), *map(answer, (2.0, 2.0, 2.0))),
    # Higher: lost; similar.
    answered("b", answer(0.5, WRONG, length=8), *map(answer, (0.0, 0.0, 0.0))),
    # As high: tied; 20 and 15 are not similar.
    answered("c", answer(1.0, WRONG, length=15), *map(answer, (1.0, 1.5, 2.0))),
    # Lower: won; 7 and 10 are not similar.
    answered("d", answer(0.0, RIGHT, length=10), *map(answer, (0.5, 0.5, 0.5))),
    # Lower: won; 30 and 29 are similar.
    answered("e", answer(4.0, length=29), *map(answer, (4.0, 5.0, 7.0)), expected=None),
    # The very same response: tied, though its reward was rounded differently; similar.
    answered(
        "f", answer(1.0000001, RIGHT, text="rewarded 1.0, 10 long"), *map(answer, (1.0, 1.0, 1.0))
    ),
]
