"""Word problems of two steps for a policy with a calculator, made from a seed or read from GSM8K.

A demonstration shows the form of a call, with what the calculator answers: `calc(12*34)408`, a line
for each step, and the answer alone on the last. Numbers are large enough that a small model cannot
work them out by itself. A problem is held out, or trained on, by a hash of its numbers alone.

With --gsm8k FOLDER (gsm8k_train.jsonl and gsm8k_test.jsonl, a `question`, an `answer` and its
`final` number each) the problems are GSM8K's: those to train on of its training questions, those
held out of its test questions, and the demonstrations of its own annotations, <<48/2=24>>.
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stages.environments.calculator import result

HOW = (
    "Calculate with calc(...), such as calc(12*3), one step at a time. Say the number alone at the "
    "end."
)
HELD_OUT = 0.15
"""Share of the numbers that are held out."""
PATIENCE = 20_000
"""So many problems in a row that are not new are taken for the end of them."""
NAMES = ("Ana", "Ben", "Carla", "Dev", "Ella", "Finn", "Grace", "Hugo", "Iris", "Jon")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
_STEP = re.compile(r"<<([^<>=]+)=([^<>]+)>>")


@dataclass(frozen=True)
class Problem:
    """A question, the calculations that answer it, and its answer."""

    question: str
    steps: Sequence[str]
    answer: str
    task: str

    @property
    def prompt(self) -> str:
        return f"{self.question}\n{HOW}"

    @property
    def demonstration(self) -> str:
        """What a policy says, and what it is answered in between."""
        return "".join(f"calc({step}){result(step)}\n" for step in self.steps) + self.answer


def made(*, held_out: bool, seed: int) -> Iterator[Problem]:
    """Different problems, as long as there are any."""
    draw = random.Random(f"{seed} {held_out}")
    asked: set[str] = set()
    in_vain = 0
    while (in_vain := in_vain + 1) <= PATIENCE:
        numbers = draw.randint(12, 99), draw.randint(12, 99), draw.randint(12, 140)
        problem = _worded(draw, *numbers)
        if _is_held_out(numbers) == held_out and problem.question not in asked:
            asked.add(problem.question)
            in_vain = 0
            yield problem


def _worded(draw: random.Random, a: int, b: int, c: int) -> Problem:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    boxes = f"{name} has {a} boxes with {b} {thing} each"
    asked = f"How many {thing} does {name} have now?"
    # The first step, and how the second goes on from its result.
    question, first, then, task = draw.choice((
        (f"{boxes} and finds {c} more. {asked}", f"{a}*{b}", f"+{c}", "times_plus"),
        (f"{boxes} and gives {c} away. {asked}", f"{a}*{b}", f"-{c}", "times_minus"),
        (f"{name} has {a} {thing}, buys {b} more, and sells all for ${c} each. "
         f"How many dollars does {name} get?", f"{a}+{b}", f"*{c}", "plus_times"),
        (f"{name} walks {a} km every day for {b} days and then {c} km more. "
         f"How many km does {name} walk?", f"{a}*{b}", f"+{c}", "times_plus"),
    ))  # fmt: skip
    second = result(first) + then
    return Problem(question, (first, second), result(second), task)


def _is_held_out(numbers: Sequence[int]) -> bool:
    text = json.dumps(sorted(numbers))
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT


def of_gsm8k(file: Path) -> Iterator[Problem]:
    """Its questions, with the steps where the calculator answers as GSM8K says."""
    if not file.is_file():
        raise SystemExit(
            f"{file} is missing: --gsm8k names a folder with GSM8K (problems.py --help)"
        )
    for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        row = json.loads(line)
        if not {"question", "answer", "final"} <= row.keys():
            raise SystemExit(f"{file}:{number} lacks a question, an answer or its final number")
        steps = _STEP.findall(row["answer"])
        fits = all(_says(step, said) for step, said in steps)
        right = steps and _same(steps[-1][1], row["final"])
        kept = tuple(step.strip() for step, _ in steps) if fits and right else ()
        yield Problem(row["question"], kept, row["final"], "gsm8k")


def _says(step: str, said: str) -> bool:
    """A closing parenthesis ends a call, so none may be in it."""
    try:
        return ")" not in step and _same(result(step), said)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return False


def _same(one: str, other: str) -> bool:
    return one.strip().lstrip("$") == other.strip().lstrip("$")


def write(folder: Path, roles: dict[str, Iterable[Problem]]) -> dict[str, int]:
    """A file for each role, as docs/data.md describes them; how many rows each has."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, problems in roles.items():
        rows = [_row(problem, shown=name == "demonstrations") for problem in problems]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts[name] = len(rows)
    return counts


def _row(problem: Problem, *, shown: bool) -> dict[str, str]:
    if shown:
        return {"prompt": problem.prompt, "completion": problem.demonstration}
    return {"prompt": problem.prompt, "answer": problem.answer, "task": problem.task}


def roles(
    gsm8k: Path | None, *, demonstrations: int, prompts: int, held_out: int, seed: int
) -> dict[str, Iterable[Problem]]:
    """What is shown, what is trained on and what is measured with: no problem is in two of them."""
    if gsm8k:
        learnt = list(of_gsm8k(gsm8k / "gsm8k_train.jsonl"))
        random.Random(seed).shuffle(learnt)
        shown = list(islice((problem for problem in learnt if problem.steps), demonstrations))
        known = {problem.question for problem in shown}
        others = [problem for problem in learnt if problem.question not in known][:prompts]
        measured: Iterable[Problem] = of_gsm8k(gsm8k / "gsm8k_test.jsonl")
    else:
        learnt = list(islice(made(held_out=False, seed=seed), demonstrations + prompts))
        shown, others = learnt[:demonstrations], learnt[demonstrations:]
        measured = made(held_out=True, seed=seed)
    return {
        "demonstrations": shown,
        "prompts": others,
        "held_out": islice(measured, held_out),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument(
        "--gsm8k", type=Path, help="a folder with gsm8k_train.jsonl and _test.jsonl"
    )
    parser.add_argument("--demonstrations", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=17)
    given = parser.parse_args()
    numbers = {
        "demonstrations": given.demonstrations,
        "prompts": given.prompts,
        "held_out": given.held_out,
    }
    print(write(given.folder, roles(given.gsm8k, **numbers, seed=given.seed)))
