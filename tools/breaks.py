"""Deliberate breaks of the code, and the tests that must fail for each.

python tools/breaks.py list [PATTERN ...]
python tools/breaks.py check
python tools/breaks.py run [PATTERN ...] [--record FILE] [--json] [--jobs N]
python tools/breaks.py sound [PATTERN ...]

tests/breaks.yaml holds the list. A break replaces one text of one file. Always true:
- The working tree is never changed. Each break is applied to a copy in a temporary folder, of the
  files that git tracks or would track, and the tests run there; so do the processes they start.
- A break is caught only by a test that ran and failed. A selection that runs no test, or that
  cannot be collected, is an error of the list.
- A test that runs past its time limit catches a break only where the list says that it may hang.

`sound` runs the named tests on a copy without a break: a test that fails anyway proves nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from break_list import LIST, TIMEOUT_S, Break, broken, load, problems, select

from benchmarks import records

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 60.0
"""How long tests may take to end once their time is over."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"\b\d+ passed\b")
_TAIL_LINES = 15
_BY_HAND = "LOCKSTEP_"
"""Variables that would change what a test does."""
_running: set[subprocess.Popen[bytes]] = set()


class Outcome(StrEnum):
    CAUGHT = "caught"
    NOT_CAUGHT = "NOT CAUGHT"
    NOT_RUN = "broken test selection"
    """No test ran, or they could not be collected."""


@dataclass(frozen=True)
class Result:
    """What the tests made of a break."""

    outcome: Outcome
    by: str | None
    """The first test that failed, or what was seen instead of one."""
    seconds: float
    tail: str = ""
    """The end of what pytest said."""

    def as_json(self) -> dict[str, Any]:
        caught = self.outcome is Outcome.CAUGHT
        other = {} if caught or self.outcome is Outcome.NOT_CAUGHT else {"error": self.outcome}
        return {"caught": caught, "by": self.by, "seconds": round(self.seconds, 1), **other}


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of all files that git tracks or would track, gone in the end with all it started."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    # A short path: sockets lie in folders below it.
    folder = Path(tempfile.mkdtemp(prefix="br-"))
    tree = folder / "tree"
    try:
        for name in filter(None, listed.stdout.decode().split("\0")):
            # A file that somebody has removed is still listed.
            if (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)
        # Tests copy the tree on, by what git lists.
        subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
        yield tree
    finally:
        _kill_those_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_those_in(folder: Path) -> None:
    """End what works in the folder: a broken program may leave processes behind."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = [process.cwd(), *process.cmdline()]
            if any(str(folder) in word for word in words):
                process.kill()


def try_break(each: Break, root: Path) -> Result:
    """Run a break's tests in a copy of the tree that has it."""
    with copied(root) as tree:
        text = broken(each, tree)
        (tree / each.file).write_text(text, encoding="utf-8")
        return _run_tests(tree, each.caught_by, each.timeout_s, may_hang=each.may_hang)


def _run_tests(tree: Path, tests: Sequence[str], timeout_s: float, *, may_hang: bool) -> Result:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE"]
    command += [f"--basetemp={tree.parent / 't'}", *tests]
    log = tree.parent / "log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=_environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            # As Ctrl-C: fixtures end what they have started.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            _kill_group(process)
            process.wait()
            _running.discard(process)
    seconds = time.monotonic() - started
    said = log.read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
    outcome, by = judge(code, said, may_hang=may_hang)
    return Result(outcome, by, seconds, tail)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def judge(code: int | None, said: str, *, may_hang: bool) -> tuple[Outcome, str | None]:
    if code is None:
        return (Outcome.CAUGHT if may_hang else Outcome.NOT_CAUGHT), "timeout"
    if code == 1:
        failed = _FAILED.search(said)
        return Outcome.CAUGHT, failed[1] if failed else None
    if code == 0 and _PASSED.search(said):
        return Outcome.NOT_CAUGHT, None
    why = "all tests were skipped" if code == 0 else f"pytest ended with exit code {code}"
    return Outcome.NOT_RUN, why


def _environment(tree: Path) -> dict[str, str]:
    """As that of this process, but that all Python started below it has the code of the copy.

    Bytecode is kept, in the copy: tests start many processes. What is temporary goes with the copy.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_BY_HAND)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        "PYTHONPATH": str(tree),
        "TMPDIR": str(tree.parent),
    }


def describe(root: Path) -> dict[str, Any]:
    """The code, the machine and the versions that results are of."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return {
        "commit": done.stdout.strip() or None,
        "hardware": records.machine(),
        "versions": records.versions("torch", "pytest"),
    }


def record(path: Path, root: Path, name: str, result: Result) -> None:
    """Put a result among those that a file has; whole or not at all."""
    breaks = {**records.recorded(path).get("breaks", {}), name: result.as_json()}
    records.write(path, {**describe(root), "breaks": dict(sorted(breaks.items()))})


def run_all(
    breaks: Sequence[Break],
    root: Path,
    jobs: int = 1,
    seen: Callable[[Break, Result], None] = lambda *_: None,
) -> dict[str, Result]:
    """The result of each break, in the order of the list; `seen` is told as they come.

    Whoever interrupts it ends the tests that run, and nothing is said of their breaks.
    """
    lock, ended = threading.Lock(), threading.Event()

    def one(each: Break) -> Result:
        result = try_break(each, root)
        with lock:
            if not ended.is_set():
                seen(each, result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return dict(zip((each.name for each in breaks), pool.map(one, breaks), strict=True))
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _kill_group(process)
            raise


def run_command(breaks: Sequence[Break], arguments: argparse.Namespace) -> int:
    """Exit status 1 where a break is not caught."""
    if wrong := problems(ROOT, breaks):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    started, done = time.monotonic(), 0

    def seen(each: Break, result: Result) -> None:
        nonlocal done
        done += 1
        by = f"  {result.by}" if result.by else ""
        line = f"[{done}/{len(breaks)}] {each.name}: {result.outcome} {result.seconds:.0f} s{by}"
        print(line, file=sys.stderr, flush=True)
        if result.outcome is Outcome.NOT_RUN:
            print(result.tail, file=sys.stderr, flush=True)
        if arguments.record:
            record(Path(arguments.record), ROOT, each.name, result)

    results = run_all(breaks, ROOT, arguments.jobs, seen=seen)
    if arguments.json:
        print(json.dumps({name: result.as_json() for name, result in results.items()}, indent=2))
    bad = {name: result for name, result in results.items() if result.outcome is not Outcome.CAUGHT}
    taken = time.monotonic() - started
    print(f"{len(results) - len(bad)} of {len(results)} caught in {taken:.0f} s", file=sys.stderr)
    for name, result in bad.items():
        print(f"{result.outcome}: {name}", file=sys.stderr)
    return 1 if bad else 0


def sound_command(breaks: Sequence[Break]) -> int:
    """Exit status 1 where a named test fails on the code as it is."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for each in breaks for test in each.caught_by):
        files.setdefault(test.partition("::")[0], []).append(test)
    bad = []
    for file, tests in files.items():
        with copied(ROOT) as tree:
            result = _run_tests(tree, tests, TIMEOUT_S, may_hang=False)
        fine = result.outcome is Outcome.NOT_CAUGHT and result.by is None
        print(f"{file}: {'passes' if fine else 'FAILS'} {result.seconds:.0f} s", flush=True)
        if not fine:
            bad.append(file)
            print(result.tail, flush=True)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "run", "sound"):
        command = commands.add_parser(name)
        command.add_argument("patterns", nargs="*", help="parts of names or files; all without")
    commands.choices["run"].add_argument("--record", help="a JSON file to put the results into")
    commands.choices["run"].add_argument("--json", action="store_true", help="print the results")
    commands.choices["run"].add_argument("--jobs", type=int, default=1, help="breaks at a time")
    commands.add_parser("check")
    arguments = parser.parse_args()
    # Copies are removed and tests are ended, also where a shell has told us to ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    breaks = load(ROOT / LIST)
    if arguments.command == "check":
        wrong = problems(ROOT, breaks)
        print(*wrong, f"{len(breaks)} breaks, {len(wrong)} problems", sep="\n")
        return 1 if wrong else 0
    chosen = select(breaks, arguments.patterns)
    if arguments.command == "list":
        for each in chosen:
            print(f"{each.name}  ({each.file})\n    {each.why}\n    {' '.join(each.caught_by)}")
        return 0
    return run_command(chosen, arguments) if arguments.command == "run" else sound_command(chosen)


if __name__ == "__main__":
    sys.exit(main())
