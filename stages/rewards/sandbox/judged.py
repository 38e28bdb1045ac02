"""Tests written as Python code, run on a program that would like to pass them.

The program and the tests run in two sandboxes, joined by two pipes (see link.py). The program
sees the arguments it is called with, and neither the tests nor what they expect.
"""

import os
from dataclasses import asdict, dataclass

from stages.rewards.sandbox import judge
from stages.rewards.sandbox.run import (
    GRACE_S,
    Descriptors,
    Stream,
    Task,
    brings,
    listen,
    read_report,
    started,
)
from stages.rewards.sandbox.values import IsolationKind, Limits, SandboxBroken, SandboxRole


@dataclass(frozen=True)
class CodeTests:
    """Trusted code that puts a program to the test."""

    cases: list[str]
    """Each passes if it runs through."""
    setup: str = ""
    """Runs before them, on the side of the tests: imports, helpers."""
    taken: tuple[str, ...] = ()
    """Names that are the program's even if `setup` defines them."""


class BrokenTests(Exception):
    """The tests themselves are wrong, whatever the program."""


def run_tests(program: str, tests: CodeTests, limits: Limits, *, kind: IsolationKind) -> list[bool]:
    """Which cases pass. The limits hold for the program, and again for the tests.

    Tests are broken if they are so with an empty program as well. Otherwise this one made them look
    broken, and what a program does can cost it its reward, but not anybody else's.
    """
    try:
        return _judged(program, tests, limits, kind)
    except BrokenTests:
        _judged("", tests, limits, kind)
        return [False] * len(tests.cases)


def _judged(program: str, tests: CodeTests, limits: Limits, kind: IsolationKind) -> list[bool]:
    with Descriptors() as ends:
        asked, ask = ends.pipe()
        answered, answer = ends.pipe()
        results_from, results_to = ends.pipe()
        nowhere = ends.own(os.open(os.devnull, os.O_WRONLY))
        candidate = Task(SandboxRole.CANDIDATE, {"program": program})
        judging = Task(SandboxRole.JUDGE, asdict(tests))
        with (
            started(candidate, limits, (asked, answer, nowhere), kind) as of_candidate,
            started(judging, limits, (answered, ask, results_to), kind) as of_judge,
        ):
            ends.close(asked, ask, answered, answer, results_to)
            longest = judge.LONGEST_RESULT * 4 + 16 * (1 + len(tests.cases))
            results, report = Stream(longest), Stream(1 << 16)
            listen({results_from: results, of_judge.report: report}, GRACE_S + limits.wall_s)
            read_report(report, results)
            if brings(of_candidate.report, 0):
                # It ended before the judge did: of itself, or because its sandbox failed.
                read_report(
                    Stream(1 << 16, bytearray(os.read(of_candidate.report, 1 << 16))), Stream(0)
                )
    ready, *lines = results.text().splitlines() or [""]
    if ready != judge.READY:
        raise SandboxBroken(f"the judge did not start: {results.text()[-1000:]!r}")
    for line in lines:
        if line.startswith(judge.BROKEN):
            raise BrokenTests(line.removeprefix(judge.BROKEN))
    passed = [line == judge.PASSED for line in lines]
    return [*passed, *[False] * (len(tests.cases) - len(passed))]
