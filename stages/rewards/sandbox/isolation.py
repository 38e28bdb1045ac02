"""Which isolation this machine offers, found out by trying it; and what happens where it has none.

A program that nobody trusts runs isolated or not at all, unless the user says in so many words that
it may run without.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from stages.rewards.sandbox.run import run_program
from stages.rewards.sandbox.values import IsolationKind, Limits, SandboxBroken, SandboxUnavailable

# Run inside, with the path of a file that exists outside: what of the outside can be reached.
_PROBE = """
import json, os, socket
reached = []
if os.path.exists(input()):
    reached.append("files")
try:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reached.append("the network")
except OSError:
    pass
if os.getppid() != 1:
    reached.append("processes")
if os.getuid() == 0:
    reached.append("the rights of root")
print(json.dumps(reached))
"""


@dataclass(frozen=True)
class Isolation:
    """What there is, and why not more."""

    kind: IsolationKind
    detail: str


@functools.cache
def isolation() -> Isolation:
    """The best kind that works here: tried once per process, with a real program."""
    why_not: list[str] = []
    for kind in (IsolationKind.NAMESPACES, IsolationKind.BUBBLEWRAP):
        problem = problem_with(kind)
        if problem is None:
            return Isolation(kind, "; ".join([*why_not, f"{kind} works"]))
        why_not.append(f"{kind}: {problem}")
    return Isolation(IsolationKind.NONE, "; ".join(why_not))


def problem_with(kind: IsolationKind) -> str | None:
    """What is wrong with this kind here; None if nothing."""
    try:
        done = run_program(_PROBE, __file__, limits=Limits(wall_s=30), kind=kind)
    except (SandboxBroken, OSError) as error:
        return str(error)
    if not done.succeeded:
        last = done.stderr.strip().splitlines()[-1:]
        return f"a test program did not run in it ({done.status}: {''.join(last)})"
    reached = json.loads(done.stdout)
    return f"a test program could reach {', '.join(reached)}" if reached else None


def kind_to_use(*, allow_unisolated: bool = False) -> IsolationKind:
    """The kind of isolation for untrusted code; an error where there is none and nobody said so."""
    offered = isolation()
    if offered.kind is not IsolationKind.NONE or allow_unisolated:
        return offered.kind
    raise SandboxUnavailable(
        f"untrusted code needs isolation, and this machine offers none ({offered.detail}).\n"
        f"{remedy()}"
    )


def remedy() -> str:
    """How to get isolation here, as far as the kernel's settings tell."""
    advice = ["install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"]
    for name, bad, good in (
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "10000"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        setting = Path("/proc/sys", name)
        if setting.exists() and setting.read_text(encoding="ascii").strip() == bad:
            advice.append(f"or, as root, sysctl {name.replace('/', '.')}={good}")
    advice.append("in a container, allow it to make user namespaces")
    return "To get it: " + "; ".join(advice) + "."
