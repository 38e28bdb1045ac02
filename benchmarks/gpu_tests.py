"""The tests that need a GPU, and how they went: hardware, versions, each test's outcome and time.

    python benchmarks/gpu_tests.py [--limit 160] [--write] [FILE ...]

Runs the tests marked `gpu` of the files that have one, and those that use a GPU where there is one.
What a test records with `record_property` or prints is kept beside its outcome. `--write` records
the run in results/gpu_tests.json, with its hardware and versions: it replaces the tests of these
files and keeps those of others.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records

ROOT = Path(__file__).resolve().parents[1]
RESULTS = records.RESULTS / "gpu_tests.json"
EITHER_WAY = "tests/stages/test_kernels.py"
"""Its tests run compiled on a GPU and interpreted elsewhere."""
VERSIONS = ("torch", "transformers", "triton", "peft", "vllm", "deepspeed", "pytest")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of all that have a test for a GPU")
    parser.add_argument("--limit", type=float, default=160, help="seconds of a file")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and not torch.cuda.is_available():
        parser.error("there is no GPU: every test would be recorded as skipped")
    found = {
        "hardware": records.hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": records.versions(*VERSIONS),
    }
    files = {}
    for file in options.files or marked():
        files[file] = {**found, **run(file, options.limit)}
        print(file, {k: v for k, v in files[file].items() if k != "tests"}, flush=True)
        if options.write:
            # Read again each time: a second run may be busy with other files.
            records.add(RESULTS, file, files[file])
    for file, outcome in files.items():
        for name, test in outcome["tests"].items():
            print(f"{test['outcome']:8} {test['seconds']:7.2f} s  {file}::{name}")
            if said := test.get("said"):
                print(said)


def marked() -> list[str]:
    """The files with a test that is marked."""
    files = (ROOT / "tests").rglob("test_*.py")
    having = [path for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [*(path.relative_to(ROOT).as_posix() for path in sorted(having)), EITHER_WAY]


def run(file: str, limit: float) -> dict[str, Any]:
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        words += [] if file == EITHER_WAY else ["-m", "gpu"]
        words += ["-p", "no:cacheprovider", "-o", "junit_logging=system-out", "--tb=short", file]
        try:
            done = subprocess.run(
                words, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=limit
            )
            ended = f"exit code {done.returncode}"
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            ended, said = f"stopped after {limit:.0f} s", str(error.stdout)
        tests = outcomes(report) if report.exists() else {}
    return {
        "recorded": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
        "ended": ended,
        "tests": tests,
        **({} if tests else {"said": said[-1500:]}),
    }


def outcomes(report: Path) -> dict[str, Any]:
    """By the test's name: how it ended, its seconds, what it recorded, what it said."""
    tests = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = next((case.find(k) for k in ("failure", "error") if case.find(k) is not None), None)
        skipped = case.find("skipped")
        outcome = "passed" if wrong is None else "failed"
        test: dict[str, Any] = {
            "outcome": outcome if skipped is None else "skipped",
            "seconds": round(float(case.get("time", 0)), 2),
        }
        if noted := {p.get("name"): p.get("value") for p in case.iter("property")}:
            test["recorded"] = noted
        said = (case.findtext("system-out") or "").strip().splitlines()
        if printed := [line for line in said if "Captured Out" not in line]:
            test["printed"] = printed[-40:]
        if wrong is not None:
            test["said"] = (wrong.text or "")[-1500:]
        if skipped is not None:
            test["why"] = skipped.get("message")
        tests[str(case.get("name"))] = test
    return tests


if __name__ == "__main__":
    main()
