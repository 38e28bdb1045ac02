"""What `lockstep plan` costs, by the number of iterations, beside `dvc status` of the same clone.

A throwaway clone is given a chain of 1, 10, ... iterations. Its plan is timed twice: when nothing
has run, and when all is up to date. For the latter, small outputs, DVC's cache and dvc.lock are
written as if every stage had run; that DVC agrees is checked with `dvc status`, which is asked for
few iterations only, as it takes long. Counted is the processor time of the whole command.

    python benchmarks/plan.py [--iterations 1 10 30 100 300] [--write]

`--write` records the result in benchmarks/results/plan.json.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from clones import environment, make_clone
from pretend import pretend_to_run
from records import RESULTS, machine, versions, write

AIM_S, AIM_ITERATIONS = 2.0, 100
MOST_FOR_DVC = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, nargs="+", default=[1, 10, 30, 100, 300])
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    rows = []
    for iterations in arguments.iterations:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), iterations))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "cpu_s": rows,
        "aim": f"under {AIM_S} s for {AIM_ITERATIONS} iterations",
        "machine": machine(),
        "versions": versions("dvc", "pydantic"),
    }
    if arguments.write:
        write(RESULTS / "plan.json", result)


def measure(folder: Path, iterations: int) -> dict[str, Any]:
    clone = make_clone(folder)
    write_iterations(clone, iterations)
    plan = [sys.executable, "-m", "pipelines", "plan"]
    first, told = cpu_of(clone, plan)
    row: dict[str, Any] = {
        "iterations": iterations,
        "stages": len(told.splitlines()) - 1,
        "nothing_has_run": first,
    }
    pretend_to_run(clone)
    cpu_of(clone, plan)  # remembers the hashes of all files, as any command does
    row["up_to_date"], told = cpu_of(clone, plan)
    if "0 to run" not in told:
        raise SystemExit(f"not up to date:\n{told}")
    if iterations <= MOST_FOR_DVC:
        row["dvc_status"], told = cpu_of(clone, [sys.executable, "-m", "dvc", "status"])
        if "up to date" not in told:
            raise SystemExit(f"dvc does not take it for up to date:\n{told}")
    return row


def cpu_of(clone: Path, command: list[str]) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=clone, env=environment(), check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return round(taken, 2), done.stdout


def write_iterations(clone: Path, count: int) -> None:
    path = clone / "params.yaml"
    names = [f"iter_{number:03}" for number in range(1, count + 1)]
    starts = ["sft", *names]
    lines = "".join(
        f"    {name}: {{policy: {start}}}\n" for name, start in zip(names, starts, strict=False)
    )
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"(    iter_\d+: .*\n)+", lines, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
