"""A session: pieces of code that are executed one after the other in a sandbox of their own.

The sandbox is what one program gets, and lives as long as the session; nothing in it has been used
before, and nothing of it is used again. `cpu_s` and `wall_s` are the limits of one execution, all
others those of the session. An execution that reaches one ends the session, with all that it had.
"""

import contextlib
import functools
import math
import os
import resource
import selectors
import time
import weakref
from dataclasses import dataclass, replace

from stages.rewards.sandbox.interpreter import LENGTH_BYTES
from stages.rewards.sandbox.run import GRACE_S, Descriptors, Stream, Task, read_report, started
from stages.rewards.sandbox.supervisor import BEGIN, REST
from stages.rewards.sandbox.values import (
    IsolationKind,
    Limits,
    SandboxBroken,
    SandboxRole,
    Status,
)

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Execution:
    """What became of a piece of code."""

    text: str
    """What it printed, then its last value or its error; nothing where it ended the session."""
    ended: Status | None = None
    """How it ended the session; None where that goes on."""


class Session:
    """Its interpreter, from outside. One that nobody has any more ends, as a closed one does."""

    def __init__(self, seed: int, limits: Limits, kind: IsolationKind) -> None:
        """`seed` is for `random`. Returns before the interpreter is there."""
        _allow_many_descriptors()
        self._limits = limits
        self._is_ready = False
        task = Task(SandboxRole.INTERPRETER, {"seed": seed})
        with contextlib.ExitStack() as stack:
            ends = stack.enter_context(Descriptors())
            questions, self._questions = ends.pipe()
            self._answers, answers = ends.pipe()
            self._output, output = ends.pipe()
            for end in (self._questions, self._output):
                os.set_blocking(end, False)
            streams = (questions, answers, output)
            without_end = replace(limits, wall_s=math.inf)
            self._sandbox = stack.enter_context(started(task, without_end, streams, kind))
            ends.close(*streams)
            self._end = weakref.finalize(self, stack.pop_all().close)

    def execute(self, source: str) -> Execution:
        """Raises SandboxBroken where the sandbox failed, whatever the code did."""
        if not self._end.alive:
            raise ValueError("the session has ended")
        code = source.encode("utf-8", "surrogatepass")
        question = len(code).to_bytes(LENGTH_BYTES, "little") + code
        output = Stream(self._limits.output_kb * 1024)
        ended: Status | None = Status.KILLED
        try:
            if not self._is_ready:
                self._start()
            self._tell_supervisor(BEGIN)
            ended = self._ask(question, output, self._limits.wall_s)
            self._tell_supervisor(REST)
        finally:
            if ended is not None:
                self.close()
        return Execution(output.text() if ended is None else "", ended)

    def close(self) -> None:
        """End everything in it."""
        self._end()

    def _start(self) -> None:
        ended = self._ask(b"", Stream(_CHUNK), GRACE_S + self._limits.wall_s)
        if ended is not None:
            raise SandboxBroken(f"its interpreter does not start ({ended})")
        self._is_ready = True

    def _tell_supervisor(self, what: bytes) -> None:
        # Where it is gone, its report says so.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._sandbox.control, what)

    def _ask(self, question: bytes, output: Stream, seconds: float) -> Status | None:
        """Wait for an answer; or say what came instead of one."""
        rest, report = memoryview(question), Stream(_CHUNK)
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            for end in (self._answers, self._output, self._sandbox.report):
                ready.register(end, selectors.EVENT_READ)
            if rest:
                ready.register(self._questions, selectors.EVENT_WRITE)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in ready.select(left):
                    if key.fd == self._questions:
                        rest = rest[_written(key.fd, rest) :]
                        if not rest:
                            ready.unregister(key.fd)
                    elif not (part := os.read(key.fd, _CHUNK)):
                        if key.fd == self._sandbox.report:
                            return read_report(report, output)[0]
                        ready.unregister(key.fd)
                    elif key.fd == self._sandbox.report:
                        report.take(part)
                    elif key.fd == self._output:
                        if output.take(part):
                            return Status.OUTPUT
                    elif not rest:
                        # What comes before all is asked is no answer to it: the code has forged it.
                        return self._take_the_rest(output)
        return Status.TIMEOUT

    def _take_the_rest(self, output: Stream) -> Status | None:
        """What was written before the answer was."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._output, _CHUNK):
                if output.take(part):
                    return Status.OUTPUT
        return None


def _written(end: int, content: memoryview) -> int:
    """How much was; all of it where nobody is left to read it."""
    try:
        return os.write(end, content[:_CHUNK])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(content)


@functools.cache
def _allow_many_descriptors() -> None:
    """A session has five here, and many are open at a time: as many as this user may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
