"""An interpreter in a sandbox: it executes one piece of code after the other, as a terminal does.

Variables, imports and files stay from one to the next. A piece of code prints what it likes; then
comes the value of its last expression, or the last line of its error. Whoever asks reads that up to
a limit, and trusts nothing of it: the code can reach all that is in here.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import random
import sys
import traceback
from types import ModuleType

from stages.rewards.sandbox.root import HOME
from stages.rewards.sandbox.streams import take_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DONE = b"d"
"""Said when it is ready, and after each piece of code."""
LENGTH_BYTES = 4
"""Of what comes before a piece of code, and says how long it is."""
_NAME = "<code>"


def be_interpreter(seed: int) -> None:
    questions, answers, output = take_streams()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    # What it prints and what it reports as an error come in the order in which it does so.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    names = _a_main_module()
    random.seed(seed)
    own = os.getpid()
    answers.write(DONE)
    while length := questions.read(LENGTH_BYTES):
        text = _executed(questions.read(int.from_bytes(length, "little")), names)
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        if os.getpid() != own:
            # A child that the code has forked comes here, too.
            return
        output.write(text.encode("utf-8", "backslashreplace"))
        answers.write(DONE)


def _a_main_module() -> dict[str, Any]:
    """As that of a script, which may import the files beside it."""
    import _sitebuiltins

    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [""]
    sys.path.append(HOME)
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    return main.__dict__


def _executed(source: bytes, names: dict[str, Any]) -> str:
    """What is shown of it, after what it has printed."""
    try:
        tree = ast.parse(source, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec", dont_inherit=True), names)
        if not isinstance(last, ast.Expr):
            return ""
        expression = ast.Expression(last.value)
        value = eval(compile(expression, _NAME, "eval", dont_inherit=True), names)
        return "" if value is None else repr(value)
    except BaseException as error:
        # SystemExit, too: the interpreter is for the next piece of code.
        return traceback.format_exception_only(error)[-1]
