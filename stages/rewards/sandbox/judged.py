"""Tests written as Python code, run on a program that would like to pass them.

The program and the tests run in two sandboxes, joined by two pipes (see conversation.py). The
program sees the arguments it is called with, and neither the tests nor what they expect.
"""

import json
import os
import select
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.rewards.sandbox import conversation
from stages.rewards.sandbox.run import GRACE_S, Descriptors, Stream, listen, read_report, started
from stages.rewards.sandbox.status import Kind
from stages.rewards.sandbox.values import Limits, SandboxBroken


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


def run_tests(program: str, tests: CodeTests, limits: Limits, *, kind: Kind) -> list[bool]:
    """Which cases pass. The limits hold for the program, and again for the tests."""
    main = Path(conversation.__file__).read_text(encoding="utf-8")
    with Descriptors() as ends:
        asked, ask = ends.pipe()
        answered, answer = ends.pipe()
        found, find = ends.pipe()
        nowhere = ends.own(os.open(os.devnull, os.O_WRONLY))
        with (
            started(main, _task(program=program), limits, (asked, answer, nowhere), kind) as it,
            started(main, _task(**asdict(tests)), limits, (answered, ask, find), kind) as judge,
        ):
            ends.close(asked, ask, answered, answer, find)
            said = conversation.LONGEST_VERDICT * 4 + 16 * (1 + len(tests.cases))
            verdict, report = Stream(said), Stream(1 << 16)
            listen({found: verdict, judge.report: report}, GRACE_S + limits.wall_s)
            read_report(report, verdict)
            if select.select([it.report], [], [], 0)[0]:
                # It ended before the judge did: of itself, or because its sandbox failed.
                read_report(Stream(1 << 16, bytearray(os.read(it.report, 1 << 16))), Stream(0))
    ready, *lines = verdict.text().splitlines() or [""]
    if ready != conversation.READY:
        raise SandboxBroken(f"the judge did not start: {verdict.text()[-1000:]!r}")
    for line in lines:
        if line.startswith(conversation.BROKEN):
            raise BrokenTests(line.removeprefix(conversation.BROKEN))
    passed = [line == conversation.PASSED for line in lines]
    return [*passed, *[False] * (len(tests.cases) - len(passed))]


def _task(**what: Any) -> dict[str, bytes]:
    return {conversation.TASK: json.dumps(what).encode()}
