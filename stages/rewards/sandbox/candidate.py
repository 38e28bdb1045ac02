"""The side of the program, which nobody trusts: it answers what the judge asks (see link.py)."""

from __future__ import annotations

import sys
import types

from stages.rewards.sandbox.link import Link, Printed
from stages.rewards.sandbox.streams import take_streams


def be_candidate(program: str) -> None:
    questions, answers, _ = take_streams()
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    exec(compile(program, "candidate.py", "exec", dont_inherit=True), module.__dict__)
    sys.stdout = Printed()
    Link(questions, answers, module.__dict__).serve()
