"""How far our losses and gradients are from TRL's on the same batches.

It runs the tests of `tests/oracle`, which compare the two, and collects what they measured.

    python benchmarks/numerics.py [--write]

`--write` records the result in benchmarks/results/numerics.json and in the tables of
docs/numerics.md. It needs the extra `oracle`.
"""

import argparse
import os
import sys

import pytest
from clones import ROOT
from records import machine, report, versions

DIFFERENT = "different"
"""The family of comparisons that are meant to come out unequal."""


class Collector:
    """A pytest plugin: what each test measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows += [value for name, value in report.user_properties if name == "numerics"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    collector = Collector()
    failed = pytest.main(["-q", "-m", "oracle", "tests/oracle"], plugins=[collector])
    if failed or not collector.rows:
        sys.exit("nothing is recorded: tests failed, or pip install '.[oracle]' is missing")
    rows = sorted(collector.rows, key=lambda row: str(row["family"]).lower())
    result = {
        "tolerance": 1e-5,
        "equal": [row for row in rows if row["family"] != DIFFERENT],
        "different": [row for row in rows if row["family"] == DIFFERENT],
        "machine": machine(),
        "versions": versions("torch", "transformers", "trl"),
    }
    report("numerics", result, to_file=arguments.write)
    if arguments.write:
        write_tables(result)


def write_tables(result: dict[str, list[dict[str, object]]]) -> None:
    """Put both tables between their marks in docs/numerics.md."""
    path = ROOT / "docs/numerics.md"
    text = path.read_text(encoding="utf-8")
    for name in ("equal", "different"):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = before + start + table(result[name]) + end + after
    path.write_text(text, encoding="utf-8")


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| | setting | ours | TRL | loss apart | gradient apart |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        family = "" if row["family"] == DIFFERENT else row["family"]
        apart = [shown(row[key]) for key in ("loss", "gradient")]
        lines.append(
            f"| {family} | {row['setting']} | {row['ours']:.6f} | {row['trl']:.6f} "
            f"| {apart[0]} | {apart[1]} |"
        )
    return "\n".join(lines) + "\n"


def shown(apart: float | None) -> str:
    if apart is None:
        return "–"
    return f"{apart:.1g}" if apart == 0 or apart > 1e-3 else f"{apart:.0e}"


if __name__ == "__main__":
    main()
