"""What the start of a command costs: processor time, in turn with that of other code.

    python benchmarks/commands.py [--rounds 15] [--against FOLDER] [--write]

Times the commands in the clone that it is called in, with the code beside it and, in turn, with
that of another clone: machines are noisy, and processor time within one run is the least so.
`--write` records the result in benchmarks/results/commands.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from clones import ROOT
from records import machine, report, versions

COMMANDS = {
    "plan": ["plan"],
    "status": ["status"],
    "stage, up to its name": ["stage", "nobody"],
    "stage --help": ["stage", "--help"],
    "--help": ["--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed")
    parser.add_argument("--against", type=Path, help="a clone with other code")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    code = {"here": ROOT} | ({"against": arguments.against} if arguments.against else {})
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds + 1):
        for command, words in COMMANDS.items():
            for name, folder in code.items():
                times.setdefault((command, name), []).append(seconds(words, folder))
    result = {
        "milliseconds": {
            name: {
                command: round(1000 * statistics.median(times[command, name][1:]))
                for command in COMMANDS
            }
            for name in code
        },
        "rounds": arguments.rounds,
        "machine": machine(),
        "versions": versions("typer", "pydantic", "dvc"),
    }
    report("commands", result, to_file=arguments.write)


def seconds(words: list[str], code: Path) -> float:
    """Processor time of one command."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines", *words],
        env={**os.environ, "PYTHONPATH": str(code.resolve())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
