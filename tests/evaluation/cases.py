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
    name: str,
    greedy: Answer,
    *sampled: Answer,
    task: str | None = None,
    expected: str | None = "4",
) -> Answered:
    return Answered(name, f"prompt {name}", expected, task, greedy, sampled)


RIGHT, WRONG = True, False

POLICY = [
    answered(
        "a",
        answer(2.0, RIGHT, length=10),
        answer(1.0, RIGHT, vote="4"),
        answer(2.0, WRONG, vote="5"),
        answer(3.0, WRONG, vote="5"),
        task="sums",
    ),
    answered(
        "b",
        answer(0.0, WRONG, length=8),
        answer(0.0, WRONG, vote="5"),
        answer(0.0, WRONG, vote="6"),
        answer(1.0, RIGHT, vote="4"),
        task="sums",
    ),
    answered(
        "c",
        answer(1.0, RIGHT, length=20),
        answer(1.0, RIGHT, vote="4"),
        answer(1.5, RIGHT, vote="4"),
        answer(2.5, RIGHT, vote="4"),
        task="sums",
    ),
    answered(
        "d",
        answer(0.5, WRONG, length=7),
        answer(0.0, WRONG, vote=None, ended=False),
        answer(0.0, WRONG, vote=None, ended=False),
        answer(1.0, RIGHT, vote="4"),
        task="words",
    ),
    # No answer to compare with.
    answered(
        "e",
        answer(5.0, length=30),
        answer(4.0),
        answer(4.0),
        answer(6.0),
        task="words",
        expected=None,
    ),
    answered("f", answer(1.0, RIGHT), answer(0.0, WRONG), answer(0.0, WRONG), answer(0.0, WRONG)),
]
REFERENCE = [
    # Lower: won. 10 and 8 differ by exactly a fifth of the longer: similar.
    answered("a", answer(1.0, RIGHT, length=8), answer(2.0), answer(2.0), answer(2.0)),
    # Higher: lost; similar.
    answered("b", answer(0.5, WRONG, length=8), answer(0.0), answer(0.0), answer(0.0)),
    # As high: tied; 20 and 15 are not similar.
    answered("c", answer(1.0, WRONG, length=15), answer(1.0), answer(1.5), answer(2.0)),
    # Lower: won; 7 and 10 are not similar.
    answered("d", answer(0.0, RIGHT, length=10), answer(0.5), answer(0.5), answer(0.5)),
    # Lower: won; 30 and 29 are similar.
    answered("e", answer(4.0, length=29), answer(4.0), answer(5.0), answer(7.0), expected=None),
    # The very same response: tied, though its reward was rounded differently; similar.
    answered("f", answer(1.0, RIGHT), answer(1.0), answer(1.0), answer(1.0)),
]
REFERENCE[5] = answered(
    "f",
    answer(1.0000001, RIGHT, text="rewarded 1.0, 10 long"),
    answer(1.0),
    answer(1.0),
    answer(1.0),
)
