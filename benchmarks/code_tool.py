"""How many calls of the environment `python` are answered a second, and how many episodes begin.

    python benchmarks/code_tool.py [--rounds 5] [--write]

Calls are of short code: a sum, a loop over a hundred numbers, a file that is written and read.
Measured are calls in sessions that are there, by as many threads as there are cores and by one for
each of 64 episodes; and whole episodes of one call, so with a sandbox that is made and removed for
it, sixteen side by side. The best of several rounds counts: others may use the machine. `--write`
records the result in benchmarks/results/code_tool.json.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from stages.environments.python import Python
from stages.rewards.sandbox.isolation import isolation

ROW = {"prompt_id": "0", "prompt": "", "answer": "1", "extra": {}}
CODE = (
    ("x = 12 + 34\nx", "46"),
    ("sum(n * n for n in range(100))", "328350"),
    ("open('f', 'w').write('kept')\nprint(open('f').read())", "kept"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    begun().close()  # what all that follow are forked from is there now
    cores = os.cpu_count() or 1
    measured: dict[str, Callable[[], float]] = {
        "calls_a_second": lambda: calls(episodes=cores, each=1000),
        "calls_a_second_of_64_episodes": lambda: calls(episodes=64, each=50),
        "episodes_of_one_call_a_second": lambda: episodes(count=200, at_a_time=16),
    }
    rounds = [
        {name: round(measure(), 1) for name, measure in measured.items()}
        for _ in range(arguments.rounds)
    ]
    result = {
        **{name: max(found[name] for found in rounds) for name in measured},
        "all_rounds": rounds,
        "isolation": str(isolation().kind),
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": records.machine(),
        "versions": records.versions(),
    }
    records.report("code_tool", result, to_file=arguments.write)


def begun() -> Python:
    tool = Python()
    tool.reset(ROW, 0)
    return tool


def calls(*, episodes: int, each: int) -> float:
    """A second, of sessions that have answered before."""
    tools = [begun() for _ in range(episodes)]
    for tool in tools:
        ask(tool, 1)
    seconds = side_by_side(lambda tool: ask(tool, each), tools, episodes)
    for tool in tools:
        tool.close()
    return episodes * each / seconds


def episodes(*, count: int, at_a_time: int) -> float:
    """A second, from the first to the end of the last one's sandbox."""

    def play(_: object) -> None:
        tool = begun()
        ask(tool, 1)
        tool.close()

    return count / side_by_side(play, range(count), at_a_time)


def ask(tool: Python, times: int) -> None:
    for number in range(times):
        code, expected = CODE[number % len(CODE)]
        assert tool.step(f"```python\n{code}\n```").text == expected


def side_by_side(do: Callable[[Any], None], items: Iterable[Any], at_a_time: int) -> float:
    with ThreadPoolExecutor(at_a_time) as pool:
        began = time.perf_counter()
        list(pool.map(do, items))
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
