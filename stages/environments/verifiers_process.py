"""A process of another Python environment, which plays the episodes of verifiers.

It belongs to the loop that it is used on, and many episodes share it. A task reads its answers, and
has its keeper end it with all that it has started: when the loop's tasks are cancelled, or when an
episode that was given up does not let go of it. The keeper does the same once this process is gone.
It is told nothing of this process's variables but those that are named.
"""

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Thread
from typing import Any

from stages.environments import verifiers_worker
from stages.environments.environment import NoAnswer
from stages.environments.variables import filled, value_of
from stages.rewards import kept_program
from stages.rewards.keeper import END_SECONDS, MARK_VARIABLE, end_marked

PASSED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Variables that the process gets in any case."""
KEPT = (sys.executable, "-I", "-S", kept_program.__file__)
"""Before the words of a command: with it ends all that it has started."""
LETS_GO_S = 5.0
"""How long an episode that is cancelled may go on."""


@dataclass(frozen=True)
class Order:
    """Which environment, and what plays it."""

    python: str
    """An interpreter, or the folder of a virtual environment; `${NAME}` stands for a variable."""
    environment: str
    arguments: Mapping[str, Any]
    weights: Mapping[str, float]
    env: Sequence[str]
    """Names of further variables that the process gets."""
    folder: Path
    """The process's, which relative paths are from."""

    def interpreter(self) -> Path:
        """NoAnswer where there is none."""
        path = self.folder / Path(filled(self.python)).expanduser()
        path = path / "bin/python" if path.is_dir() else path
        if not self.python or not os.access(path, os.X_OK):
            raise NoAnswer(
                f"`python` is {self.python!r}, and there is no interpreter {path}: name a virtual "
                "environment that has verifiers and the environment: python -m venv FOLDER; "
                "FOLDER/bin/pip install 'verifiers<0.4' ENVIRONMENT"
            )
        return path

    def message(self) -> Mapping[str, Any]:
        """For the process; NoAnswer where that cannot be told it."""
        told = {name: getattr(self, name) for name in ("environment", "arguments", "weights")}
        try:
            json.dumps(told)
        except (TypeError, ValueError) as error:
            raise NoAnswer(f"{self}: its arguments and weights are not JSON: {error}") from None
        return {**told, "folder": str(self.folder)}

    def __str__(self) -> str:
        return f"verifiers environment {self.environment!r} of {self.python}"


class Process:
    """The process, started at once."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.usable = True
        """False once it has ended: whoever comes next needs another."""
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unanswered: set[int] = set()
        """Of all that was asked. The thread that reads takes out what is answered: in a process of
        `isolated.py` this loop stands still between two questions, and its timers do not."""
        self._mark = uuid.uuid4().hex
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """What it says; None after the last."""
        self._questions: SimpleQueue[bytes | None] = SimpleQueue()
        """What it is told, a line each; None after the last."""
        self._task = self._loop.create_task(self._keep())

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer; NoAnswer where it refuses. Whoever is cancelled gives up the question."""
        # Who waits for it may be cancelled; the others still need it.
        await asyncio.shield(self._ready)
        if not self.usable:
            raise NoAnswer(f"{self.order}: its process has ended")
        number = next(self._numbers)
        self._waiting[number] = self._loop.create_future()
        self._unanswered.add(number)
        try:
            self._say({"n": number, **question})
            answer = await self._waiting[number]
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        finally:
            self._waiting.pop(number, None)
        if "refused" in answer:
            raise NoAnswer(f"{self.order}: {answer['refused']}")
        return answer

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _give_up(self, number: int) -> None:
        if number in self._unanswered and self.usable and not self._loop.is_closed():
            self._say({"n": number, "cancel": True})
            self._loop.call_later(LETS_GO_S, self._end_if_held, number)

    def _end_if_held(self, number: int) -> None:
        """An episode that keeps the process busy keeps all others waiting."""
        if number in self._unanswered:
            print(f"{self.order}: an episode did not let go of its process, which is ended")
            self._task.cancel()

    def _say(self, message: Mapping[str, Any]) -> None:
        self._questions.put(json.dumps(message).encode() + b"\n")

    async def _keep(self) -> None:
        process = None
        try:
            process = self._started()
            answer = await self._lines.get()
            if answer is None or "refused" in answer:
                raise NoAnswer(f"{self.order}: {answer['refused'] if answer else _ended(process)}")
            self._ready.set_result(None)
            while (answer := await self._lines.get()) is not None:
                self._hear(answer)
            raise NoAnswer(f"{self.order}: {_ended(process)}")
        except NoAnswer as problem:
            self._fail(problem)
        finally:
            self._fail(NoAnswer(f"{self.order}: its process was ended"))
            self._questions.put(None)
            if process is not None:
                _end(process)
                end_marked(self._mark)

    def _started(self) -> "Popen[bytes]":
        interpreter = self.order.interpreter()
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        passed |= {name: value_of(name) for name in self.order.env}
        self._say(self.order.message())
        try:
            process = Popen(
                [*KEPT, interpreter, verifiers_worker.__file__],
                stdin=PIPE,
                stdout=PIPE,
                cwd=self.order.folder,
                env={**passed, "PYTHONHASHSEED": "0", MARK_VARIABLE: self._mark},
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer(f"{self.order}: {interpreter} does not start: {error}") from None
        for talk in (self._write, self._read):
            Thread(target=talk, args=(process,), daemon=True).start()
        return process

    def _write(self, process: "Popen[bytes]") -> None:
        """In a thread: a process that does not read keeps nobody else waiting."""
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended, which is heard elsewhere
            while (line := self._questions.get()) is not None:
                process.stdin.write(line)
                process.stdin.flush()

    def _read(self, process: "Popen[bytes]") -> None:
        """In a thread: until the process has ended, or the loop."""
        assert process.stdout is not None
        with suppress(RuntimeError), process.stdout:
            try:
                for line in process.stdout:
                    answer = json.loads(line)
                    self._unanswered.discard(answer.get("n"))
                    self._loop.call_soon_threadsafe(self._lines.put_nowait, answer)
            except ValueError:
                process.terminate()  # most likely it ended in the middle of an answer
            self._loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _hear(self, answer: dict[str, Any]) -> None:
        waiting = self._waiting.get(answer["n"])
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, problem: NoAnswer) -> None:
        """All that is asked, and whoever asks later."""
        self.usable = False
        self._unanswered.clear()
        everyone: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for waiting in everyone:
            if not waiting.done():
                waiting.set_exception(problem)
                waiting.exception()  # it may be that nobody waits for it any more


def _end(process: "Popen[bytes]") -> None:
    """And all that it has started: its keeper does it."""
    process.terminate()
    try:
        process.wait(2 * END_SECONDS)
    except TimeoutExpired:
        process.kill()
        process.wait()


def _ended(process: "Popen[bytes]") -> str:
    code = process.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"its process {how}; what it wrote is in the log of the stage"
