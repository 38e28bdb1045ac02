"""Arithmetic in words and digits, made from a seed: what a small model can learn by GRPO.

Four tasks, from what SmolLM2-135M mostly knows to what it mostly does not:

add1      one-digit additions, as a sentence or bare
add2      two-digit additions, bare
word      small word problems with one addition or subtraction
one_step  one step as in GSM8K: prices, boxes, shares, distances

A problem is held out, or trained on, by a hash of its numbers alone: where 3 + 5 is held out, no
task trains on 3 and 5, in whatever order and wording.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

PATIENCE = 20_000
"""So many problems in a row that are not new are taken for the end of them."""
HELD_OUT = 0.15
"""Share of the numbers that are held out."""
NAMES = ("Ana", "Ben", "Carla", "Dev", "Ella", "Finn", "Grace", "Hugo", "Iris", "Jon")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
HOW = "Answer with the number."


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and the numbers that make it what it is."""

    prompt: str
    answer: str
    task: str
    numbers: tuple[int, ...]

    @property
    def is_held_out(self) -> bool:
        text = json.dumps(sorted(self.numbers))
        return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT


def _one_digit(draw: random.Random) -> Problem:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    wording = draw.choice((
        f"{a}+{b}=",
        f"What is {a} + {b}? {HOW}",
        f"Add {a} and {b}. {HOW}",
        f"How much is {a} plus {b}? {HOW}",
        f"{a} + {b} is what? {HOW}",
        f"Find the sum of {a} and {b}. {HOW}",
    ))  # fmt: skip
    return Problem(wording, str(a + b), "add1", (a, b))


def _two_digits(draw: random.Random) -> Problem:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return Problem(f"{a}+{b}=", str(a + b), "add2", (a, b))


def _in_words(draw: random.Random) -> Problem:
    a, b = sorted((draw.randint(1, 12), draw.randint(1, 12)), reverse=True)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first = f"{name} has {a} {thing}"
    text, answer = draw.choice((
        (f"{first} and gets {b} more.", a + b),
        (f"{first} and gives {b} away.", a - b),
        (f"{first} and finds {b} more in a drawer.", a + b),
        (f"{first} and loses {b} on the way home.", a - b),
    ))  # fmt: skip
    question = f"{text} How many {thing} does {name} have now? {HOW}"
    return Problem(question, str(answer), "word", (a, b))


def _one_step(draw: random.Random) -> Problem:
    a, b = draw.randint(2, 12), draw.randint(2, 12)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    text, answer = draw.choice((
        (f"A box holds {a} {thing}. How many {thing} are in {b} boxes?", a * b),
        (f"{name} buys {a} {thing} for ${b} each. How many dollars does {name} pay?", a * b),
        (f"{name} shares {a * b} {thing} equally among {a} friends. "
         f"How many {thing} does each friend get?", b),
        (f"{name} walks {a} km every day. How many km does {name} walk in {b} days?", a * b),
    ))  # fmt: skip
    return Problem(f"{text} {HOW}", str(answer), "one_step", (a, b))


def problems(count: int, *, held_out: bool, seed: int) -> Iterator[Problem]:
    """`count` different problems, the tasks in turn."""
    draw = random.Random(f"{seed} {held_out}")
    makers = (_one_digit, _two_digits, _in_words, _one_step)
    asked: set[str] = set()
    in_vain = 0
    for maker in cycle(makers):
        if len(asked) == count:
            return
        problem = maker(draw)
        if problem.is_held_out == held_out and problem.prompt not in asked:
            asked.add(problem.prompt)
            in_vain = 0
            yield problem
        elif (in_vain := in_vain + 1) > PATIENCE:
            raise ValueError(f"there are hardly more than {len(asked)} problems, not {count}")


def write(folder: Path, *, prompts: int, held_out: int, seed: int) -> None:
    """prompts.jsonl and held_out.jsonl, as docs/data.md describes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("prompts", prompts), ("held_out", held_out)):
        made = problems(count, held_out=name == "held_out", seed=seed)
        rows = [{"prompt": p.prompt, "answer": p.answer, "task": p.task} for p in made]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=17)
    given = parser.parse_args()
    write(given.folder, prompts=given.prompts, held_out=given.held_out, seed=given.seed)
