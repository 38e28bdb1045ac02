"""How many programs a second `kind: code` judges, beside an earlier revision in the same run.

Each judgement is one program against three assert statements, in two sandboxes of its own, with as
many side by side as there are cores and two more. Rounds of the two revisions take turns.

    python benchmarks/sandbox.py [--before REVISION] [--programs 200] [--rounds 3] [--write]

`--write` records the result in benchmarks/results/sandbox.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from records import machine, report, versions

ROOT = Path(__file__).resolve().parents[1]
MEASURE = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.judged import CodeTests, run_tests
from stages.rewards.sandbox.values import Limits

kind = isolation().kind
tests = CodeTests([f"assert f({n}) == {n * n}" for n in (2, 3, 12)])

def judge(number):
    right = number % 2
    program = "def f(x):\\n    return x * x" if right else "def f(x):\\n    return x + 2"
    assert run_tests(program, tests, Limits(), kind=kind) == [True, bool(right), bool(right)]

judge(1)
with ThreadPoolExecutor(os.cpu_count() + 2) as pool:
    start = time.perf_counter()
    list(pool.map(judge, range(int(sys.argv[1]))))
    print(json.dumps([str(kind), time.perf_counter() - start]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a revision of this repository to measure as well")
    parser.add_argument("--programs", type=int, default=200, help="judgements in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = {"now": ROOT}
        if arguments.before:
            trees["before"] = Path(folder, "before")
            trees["before"].mkdir()
            archive = subprocess.check_output(["git", "archive", arguments.before], cwd=ROOT)
            subprocess.run(["tar", "x", "-C", trees["before"]], input=archive, check=True)
        rates: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                kind, seconds = measure(tree, arguments.programs)
                rates[name].append(arguments.programs / seconds)
                print(f"{name}: {rates[name][-1]:.1f} a second ({kind})", flush=True)
    result = {
        "a_second": {name: round(statistics.median(found), 1) for name, found in rates.items()},
        "all_rounds": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
        "programs": arguments.programs,
        "isolation": kind,
        "before": arguments.before,
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": machine(),
        "versions": versions(),
    }
    report("sandbox", result, to_file=arguments.write)


def measure(tree: Path, programs: int) -> tuple[str, float]:
    command = [sys.executable, "-c", MEASURE, str(programs)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    kind, seconds = json.loads(subprocess.check_output(command, cwd=tree, env=environment))
    return str(kind), float(seconds)


if __name__ == "__main__":
    main()
