"""Programs that attack the sandbox get nowhere, whoever runs it; an escape would be noticed."""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.values import IsolationKind
from tests.sandbox.attack import LIMITS, ROOT
from tests.sandbox.programs import HARMLESS, PROGRAMS

SYSTEM_PYTHON = Path("/usr/bin/python3")
NOBODY = ("setpriv", "--reuid=65533", "--regid=65533", "--clear-groups")
PROBE = """
import sys
from stages.rewards.sandbox.isolation import problem_with
from stages.rewards.sandbox.values import IsolationKind
print(problem_with(IsolationKind(sys.argv[1])) or "")
"""
# A loaded machine may take its time to start and end a sandbox.
SLACK_S = 20
# The launcher and the supervisor, beside the program's own.
OURS = 2


@dataclass(frozen=True)
class Who:
    """A user, their Python, the kind of isolation they use, and what they run the attacks in."""

    name: str
    prefix: tuple[str, ...]
    python: str
    kind: IsolationKind
    how: str = "program"

    def run(self, *names: str) -> dict[str, dict[str, Any]]:
        script = Path(__file__).with_name("attack.py")
        command = [*self.prefix, self.python, "-B", str(script), self.kind, self.how, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, dict[str, Any]] = json.loads(done.stdout)
        return found


ME = Who("me", (), sys.executable, isolation().kind)
SOMEBODY = Who("an ordinary user", NOBODY, str(SYSTEM_PYTHON), IsolationKind.NAMESPACES)
WITH_BUBBLEWRAP = Who("with bubblewrap", NOBODY, str(SYSTEM_PYTHON), IsolationKind.BUBBLEWRAP)
MY_SESSION = replace(ME, name="my session", how="session")
ANOTHERS_SESSION = replace(SOMEBODY, name="another's session", how="session")
OWN_PIPES = "uses descriptors left open"
"""A session has those to its caller, and test_session.py shows that there are no others."""


@functools.cache
def why_not(who: Who) -> str | None:
    """What keeps this user from running the attacks here."""
    if who.prefix == ():
        return None if who.kind is not IsolationKind.NONE else isolation().detail
    if os.geteuid() != 0:
        return "only root can become another user"
    if not SYSTEM_PYTHON.exists() or shutil.which("setpriv") is None:
        return "needs setpriv and a Python that every user can read"
    version = [str(SYSTEM_PYTHON), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if subprocess.run(version, check=False).returncode:
        return "the system's Python is older than 3.11"
    if subprocess.run(
        [*NOBODY, "test", "-r", str(ROOT / "pyproject.toml")], check=False
    ).returncode:
        return "other users cannot read this folder"
    if who.kind is IsolationKind.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    asked = [*who.prefix, who.python, "-B", "-c", PROBE, who.kind]
    probe = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return probe.stdout.strip() or None


@functools.cache
def results(who: Who) -> dict[str, dict[str, Any]]:
    return who.run(*PROGRAMS if who.how == "program" else PROGRAMS.keys() - {OWN_PIPES})


def result(who: Who, name: str) -> dict[str, Any]:
    if reason := why_not(who):
        pytest.skip(reason)
    return results(who)[name]


EVERYBODY = pytest.mark.parametrize(
    "who", [ME, SOMEBODY, WITH_BUBBLEWRAP], ids=lambda who: who.name
)


SESSIONS = pytest.mark.parametrize("who", [MY_SESSION, ANOTHERS_SESSION], ids=lambda who: who.name)


@EVERYBODY
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_gets_out(who: Who, name: str) -> None:
    check_nothing_got_out(result(who, name))


@SESSIONS
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != OWN_PIPES])
def test_nothing_gets_out_of_a_session(who: Who, name: str) -> None:
    found = result(who, name)
    check_nothing_got_out(found)
    if name in ENDS:
        assert found["status"] in ENDS[name]
    if name in ("kills the supervisor", "starves the supervisor"):
        assert "still here" in found["stdout"]


def check_nothing_got_out(found: dict[str, Any]) -> None:
    assert found["escaped"] == []
    assert found["seconds"] < LIMITS.wall_s + SLACK_S
    # At least twenty milliseconds pass between two looks at the memory: each has its own limit.
    assert found["memory_mb"] < LIMITS.processes * LIMITS.memory_mb
    assert found["processes"] <= LIMITS.processes + OURS + 2


ENDS = {
    "takes all memory in many processes": {"memory"},
    "prints without end": {"output"},
    "prints errors without end": {"output"},
    "prints in many processes": {"output"},
    "computes without end": {"cpu"},
    "computes without end in many processes": {"cpu"},
    "computes on through the warning": {"cpu"},
    "computes in children that nobody buries": {"cpu"},
    "computes in children whose end is no signal": {"cpu", "processes"},
    "builds what is hard to remove": {"finished", "memory"},
    "names itself like a line of the supervisor's": {"finished"},
    "sleeps for ever": {"timeout"},
    "stops itself": {"timeout"},
    "crashes": {"crashed"},
    "kills whatever it can": {"killed"},
    "kills the supervisor": {"finished"},
    "starves the supervisor": {"finished"},
    "leaves a daemon behind": {"finished"},
    "does not read its input": {"finished"},
    "forks without end": {"cpu", "processes"},
    "forks without end, each in a session of its own": {"cpu", "processes", "timeout"},
    "starts threads without end": {"cpu", "processes"},
}


@EVERYBODY
@pytest.mark.parametrize("name", ENDS)
def test_the_outcome_says_how_it_ended(who: Who, name: str) -> None:
    assert result(who, name)["status"] in ENDS[name]


@EVERYBODY
def test_a_program_cannot_report_in_the_supervisors_name(who: Who) -> None:
    found = result(who, "says that it is done in the supervisor's name")
    assert (found["status"], found["exit_code"]) == ("finished", 7)


@EVERYBODY
def test_programs_were_alive_when_they_attacked(who: Who) -> None:
    """An attack that fails at its first line proves nothing."""
    assert "still here" in result(who, "kills the supervisor")["stdout"]
    for name in PROGRAMS.keys() - {"recurses without end", "computes in one long instruction"}:
        found = result(who, name)
        assert "Traceback" not in found["stderr"], name
        assert found["exit_code"] in (None, 0, 7), name


def test_the_checks_notice_an_escape_where_nothing_is_isolated() -> None:
    """Attacks that do no harm are let out: each must be seen, or its test above means nothing."""
    found = Who("me", (), sys.executable, IsolationKind.NONE).run(*HARMLESS)
    assert [name for name in HARMLESS if not found[name]["escaped"]] == []


def test_there_are_many_attacks() -> None:
    assert len(PROGRAMS) >= 40
