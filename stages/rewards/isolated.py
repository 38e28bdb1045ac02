"""A Python process for code that we did not write, which can be killed wherever it hangs.

A rule may meet a response that it never finishes with, a function of the user's may do anything: in
a process of its own it can neither take the stage with it nor keep it waiting, not even from inside
a C call, and all that it has started ends with it. Questions and answers cross as lines of JSON,
through pipes that the code does not see: what it prints goes to the job's log.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.rewards import isolated_worker
from stages.rewards.keeper import END_SECONDS, MARK_VARIABLE, end_marked

START_SECONDS = 120.0
"""How long the process may take to import what it needs."""


class Hung(Exception):
    """The process timed out, by the clock or in CPU time; it has been killed."""


class CannotScore(Exception):
    """The process cannot score, and says why; `index` is the row's, where it knows."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index


class Isolated:
    """The process; it starts when first needed, and again after it was ended."""

    def __init__(self, order: Mapping[str, Any], worker: str = isolated_worker.__file__) -> None:
        """`order`: the first line that it gets, which says what it shall answer by."""
        self.order = order
        self.starts = 0
        """How often the process was started."""
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.is_over = False
        """Whether it was ended for good."""
        self._mark = uuid.uuid4().hex

    def score(self, rows: Sequence[Mapping[str, Any]], seconds: float) -> list[float]:
        """A reward for each row, within so many seconds."""
        rewards: list[float] = self.ask({"rows": list(rows)}, seconds)["rewards"]
        return rewards

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The process's answer, within so many seconds."""
        self.start()
        return self._ask(message, seconds)

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Have the process running and ready: what it imports takes time of its own."""
        if self._process is not None:
            return
        root = Path(isolated_worker.__file__).parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._unread = b""
        self.starts += 1
        self._process = subprocess.Popen(
            # -P: a folder called `stages` where we happen to be is not the code that is meant.
            [sys.executable, "-P", self._worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                # Sets of words come in the same order in every run.
                "PYTHONHASHSEED": "0",
                # The folder of functions is an input: importing from it must not change it.
                "PYTHONDONTWRITEBYTECODE": "1",
                MARK_VARIABLE: self._mark,
            },
        )
        if self.is_over:
            self.close()
            raise CannotScore("nobody waits for it any more")
        try:
            self._ask(self.order, START_SECONDS)
        except Hung:
            raise CannotScore(f"its process was not ready after {START_SECONDS:g} s") from None

    def end(self) -> None:
        """Close for good: whoever is just about to start the process does not."""
        self.is_over = True
        self.close()

    def close(self) -> None:
        """End the process, and what it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        end_marked(self._mark)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(process, seconds))
        except (OSError, EOFError, ValueError):
            self.close()
            if process.returncode == -signal.SIGPROF:
                raise Hung from None
            raise CannotScore(_how_it_ended(process.returncode)) from None
        except Hung:
            self.close()
            raise
        if "refused" in answer:
            raise CannotScore(answer["refused"], answer.get("index"))
        return answer

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                raise Hung
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class Workers:
    """Where processes come from, and go when a pass is done: here, each is for one pass."""

    def take(self, order: Mapping[str, Any]) -> Isolated:
        return Isolated(order)

    def give_back(self, process: Isolated) -> None:
        process.end()


class KeptWorkers(Workers):
    """Processes wait for the next pass with the same order: what they imported is at hand.

    For those alone whose answers do not depend on what they were asked before.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[Isolated]] = {}

    def take(self, order: Mapping[str, Any]) -> Isolated:
        idle = self._idle.get(_key(order))
        return idle.pop() if idle else Isolated(order)

    def give_back(self, process: Isolated) -> None:
        if not process.is_over:
            self._idle.setdefault(_key(process.order), []).append(process)

    def close(self) -> None:
        for processes in self._idle.values():
            for process in processes:
                process.end()
        self._idle.clear()


def _key(order: Mapping[str, Any]) -> str:
    return json.dumps(order, sort_keys=True)


def _how_it_ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0 and returncode != -signal.SIGKILL:
        return f"its process was ended by {signal.Signals(-returncode).name}"
    if returncode is not None and returncode >= 0:
        return f"its process exited with code {returncode} before it had answered (see the log)"
    return "its process ended without an answer (see the log; was it out of memory?)"
