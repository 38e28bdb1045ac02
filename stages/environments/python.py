"""Python as a tool: a turn that ends with a block of code is answered with what the code says.

A call is a fenced block that names Python as its language and ends the turn. It is executed in a
sandbox of the episode's own, where variables, imports and files stay from one call to the next. The
answer is what the code printed, then the value of its last expression or the last line of its
error, cut to `longest` bytes. Any other turn is the policy's answer and ends the episode: 1 where
its result is the row's `answer` (maths.is_plainly_right), else 0.

A call that reaches a limit, or ends the interpreter, is told so; the next one has a new
interpreter, without the variables and files of the one before. An interpreter that something else
killed is made anew and executes again what it has executed.

Each interpreter's `random` is seeded with the episode's seed, and sets of texts have the same order
everywhere. Addresses of objects are not shown. Not covered: clocks, os.urandom, orders that follow
from addresses, threads and processes that run on between two calls.
"""

import re
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from stages.environments.environment import Environment, Observation, right_answer
from stages.rewards.maths import is_plainly_right
from stages.rewards.sandbox.isolation import kind_to_use
from stages.rewards.sandbox.session import Execution, Session
from stages.rewards.sandbox.values import Limits, Status

_CALL = re.compile(r"^```[ \t]*(?:python3?|py)[ \t]*\n((?:(?!```).*\n)*)```\Z", re.M | re.I)
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+(?=>)")
_CUT = "\n...\n"
_REACHED = {
    Status.CPU: "it took more than {0.cpu_s:g} seconds of CPU time",
    Status.TIMEOUT: "it took more than {0.wall_s:g} seconds",
    Status.MEMORY: "it took more than {0.memory_mb} MB of memory",
    Status.PROCESSES: "it had more than {0.processes} processes",
    Status.OUTPUT: "it printed more than {0.output_kb} kB",
}
_FIRST_PROBE = threading.Lock()


class Python(Environment):
    """An episode with the tool."""

    limits: ClassVar[Limits] = Limits(cpu_s=5, wall_s=30)
    """`cpu_s` and `wall_s` are of one call, all others of the episode."""
    longest: ClassVar[int] = 512
    """Bytes of an observation, and so no fewer than its tokens for a tokenizer of bytes."""

    _session: Session | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._answer, self._seed = right_answer(row), seed
        self._executed: list[str] = []
        """By the interpreter that there is."""
        with _FIRST_PROBE:
            self._kind = kind_to_use()
        # It is there by the time of the first call: starting it takes longer than most calls.
        self._session = self._a_session()

    def step(self, action: str) -> Observation:
        call = _CALL.search(action.rstrip())
        if call is None:
            return Observation(reward=float(is_plainly_right(action, self._answer)), done=True)
        done = self._execute(call[1])
        if done.ended is None:
            return Observation(shown(done.text, self.longest))
        why = _REACHED.get(done.ended, "it exited").format(self.limits)
        return Observation(f"The interpreter was ended: {why}. Variables and files are lost.")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _a_session(self) -> Session:
        return Session(self._seed, self.limits, self._kind)

    def _execute(self, code: str) -> Execution:
        """Twice where the interpreter was killed: then it is the code that does it."""
        for _ in range(2):
            sources = [code]
            if self._session is None:
                self._session = self._a_session()
                sources = [*self._executed, code]
            for source in sources:
                done = self._session.execute(source)
                if done.ended is not None:
                    self._session = None
                    break
            if done.ended is not Status.KILLED:
                break
        self._executed = [] if done.ended else [*self._executed, code]
        return done


def shown(text: str, longest: int) -> str:
    """Without addresses and trailing space; of what is too long, the beginning and the end."""
    text = _ADDRESS.sub("0x...", text).rstrip() or "(no output)"
    content = text.encode()
    if len(content) <= longest:
        return text
    half = (longest - len(_CUT)) // 2
    ends = (part.decode(errors="ignore") for part in (content[:half], content[-half:]))
    return _CUT.join(ends)
