"""A verifiable task made from a seed: addition with the working written out.

    prompt    38+47=
    response  8+7=15;3+4=7+1=8;85

Columns from the units up, a carry added to the column it goes to, then the sum. A *problem* is an
unordered pair of numbers, so that holding out 38+47 keeps 47+38 out of training too.

Demonstrations are of mixed quality. Most wrong ones forget a carry, which is systematic: whoever
imitates them forgets carries even when decoding greedily, and has something to learn from a
reward. The other slips are scattered, and teach the reward model what else can go wrong.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stages.data.seeds import shuffled, stable_hash

NAME = "arithmetic"
"""What its rows are said to come from."""
ANSWER_AFTER = ";"
"""The answer is what follows the last of these."""
SCATTERED_SHARE = 0.25
"""How often a problem without a carry is shown wrong, relative to the average."""
CARRY_SHARE = 0.85
"""How many of the rejected responses slip in a carry, forgotten or spurious."""


class Slip(StrEnum):
    """The mistakes of a worked addition."""

    FORGOTTEN_CARRY = "forgotten_carry"
    SPURIOUS_CARRY = "spurious_carry"
    WRONG_SUM = "wrong_sum"
    MISREAD_DIGIT = "misread_digit"
    MISCOPIED_ANSWER = "miscopied_answer"


@dataclass(frozen=True, order=True)
class Problem:
    """Two numbers to add, in the order in which they are shown."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def task(self) -> str:
        """What an evaluation reports apart: demonstrations go wrong mostly where carries are."""
        return "carry" if self.carries else "no_carry"

    @property
    def width(self) -> int:
        """Columns of the longer number."""
        return len(str(max(self.left, self.right)))

    def carries_into(self, column: int) -> bool:
        scale: int = 10**column
        return self.left % scale + self.right % scale >= scale

    @property
    def carries(self) -> bool:
        """Whether some column below the last hands a carry on: what can be forgotten."""
        return any(map(self.carries_into, range(1, self.width)))


def unordered_problems(digits: int) -> list[Problem]:
    """Every problem with numbers of at most that many digits, the smaller number first."""
    top = 10**digits
    return [Problem(left, right) for left in range(top) for right in range(left, top)]


def either_order(problem: Problem, *seed: str | int) -> Problem:
    """The problem as it is, or with its numbers swapped."""
    if stable_hash(*seed, problem.prompt) % 2:
        return Problem(problem.right, problem.left)
    return problem


def draw(problems: Sequence[Problem], count: int, *seed: str | int) -> list[Problem]:
    """`count` problems in random order, each used equally often, give or take one."""
    drawn: list[Problem] = []
    for lap in range(-(-count // len(problems))):
        order = shuffled(len(problems), *seed, lap)[: count - len(drawn)]
        drawn += [either_order(problems[index], *seed, lap) for index in order]
    return drawn


def worked(problem: Problem, slip: Slip | None = None, seed: int = 0) -> str:
    """The written-out addition; with a slip, one that ends in a wrong answer."""
    rng = random.Random(seed)
    column_of_slip = _slipping_column(problem, slip, rng)
    steps, sum_digits, carry = [], "", 0
    for column in range(problem.width):
        first = problem.left // 10**column % 10
        second = problem.right // 10**column % 10
        if column == column_of_slip:
            if slip is Slip.FORGOTTEN_CARRY:
                carry = 0
            elif slip is Slip.SPURIOUS_CARRY:
                carry = 1
            elif slip is Slip.MISREAD_DIGIT:
                first = (first + rng.randrange(1, 10)) % 10
        total = first + second
        if column == column_of_slip and slip is Slip.WRONG_SUM:
            total = rng.choice([other for other in range(19) if other != total])
        step = f"{first}+{second}={total}"
        if carry:
            total += carry
            step += f"+{carry}={total}"
        steps.append(step)
        last = column == problem.width - 1
        sum_digits = (str(total) if last else str(total % 10)) + sum_digits
        carry = total // 10
    answer = str(int(sum_digits))
    if slip is Slip.MISCOPIED_ANSWER:
        position = rng.randrange(len(answer))
        digit = (int(answer[position]) + rng.randrange(1, 10)) % 10
        answer = f"{answer[:position]}{digit}{answer[position + 1 :]}"
    return ANSWER_AFTER.join([*steps, answer])


def steps(working: str) -> list[str]:
    """A worked text in its steps, each with what ends it; the last is the answer."""
    *columns, answer = working.split(ANSWER_AFTER)
    return [*(column + ANSWER_AFTER for column in columns), answer]


def possible_slips(problem: Problem) -> list[Slip]:
    """The ways in which this problem's working can go wrong."""
    slips = [Slip.WRONG_SUM, Slip.MISREAD_DIGIT, Slip.MISCOPIED_ANSWER]
    if problem.carries:
        slips.append(Slip.FORGOTTEN_CARRY)
    if not all(map(problem.carries_into, range(1, problem.width))):
        slips.append(Slip.SPURIOUS_CARRY)
    return slips


def demonstrations(problems: Sequence[Problem], accuracy: float, seed: int) -> list[str]:
    """A worked text for each problem, about `accuracy` of them right.

    Wrong ones fall mostly on problems with a carry, where it is forgotten.
    """
    wrong = 1 - accuracy
    carrying = sum(problem.carries for problem in problems) / len(problems)
    wrong_plain = wrong * SCATTERED_SHARE
    wrong_carrying = (wrong - (1 - carrying) * wrong_plain) / carrying if carrying else 0.0
    if wrong_carrying > 1 or not carrying:
        wrong_carrying = 1.0
        wrong_plain = (wrong - carrying) / (1 - carrying) if carrying < 1 else 0.0
    texts = []
    for index, problem in enumerate(problems):
        rng = random.Random(stable_hash(seed, "demonstration", index))
        slips = rng.random() < (wrong_carrying if problem.carries else wrong_plain)
        slip: Slip | None = None
        if slips and problem.carries:
            slip = Slip.FORGOTTEN_CARRY
        elif slips:
            slip = rng.choice(possible_slips(problem))
        texts.append(worked(problem, slip, rng.getrandbits(32)))
    return texts


def rejected(problem: Problem, seed: int, name: str) -> str:
    """A wrong working of the problem: mostly a slip in a carry, as in the demonstrations."""
    rng = random.Random(stable_hash(seed, "rejected", name))
    slips = possible_slips(problem)
    in_carry: list[Slip] = [
        slip for slip in slips if slip in (Slip.FORGOTTEN_CARRY, Slip.SPURIOUS_CARRY)
    ]
    if in_carry and rng.random() < CARRY_SHARE:
        slips = in_carry
    return worked(problem, rng.choice(slips), rng.getrandbits(32))


def _slipping_column(problem: Problem, slip: Slip | None, rng: random.Random) -> int | None:
    """The column in which the slip happens, of those in which it can."""
    if slip in (Slip.FORGOTTEN_CARRY, Slip.SPURIOUS_CARRY):
        carried = slip is Slip.FORGOTTEN_CARRY
        columns = range(1, problem.width)
        return rng.choice([c for c in columns if problem.carries_into(c) is carried])
    if slip in (Slip.WRONG_SUM, Slip.MISREAD_DIGIT):
        return rng.randrange(problem.width)
    return None
