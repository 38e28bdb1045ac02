"""Programs that use vLLM, each a process of its own, forked from one that has imported it.

`Programs` starts them from a test. This module, run by its name, is what it talks to, by a line of
JSON for each request and each answer: tests do not have vLLM on their own path.
"""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.waiting import TIMEOUT_S

ROOT = Path(__file__).parents[2]
LOG, FORKED_FROM = "TESTS_LOG_OF_PROGRAM", "TESTS_PROGRAM_IS_FORKED_FROM"
"""Variables of a program: where its output goes, and the address of what it is forked from."""


class Programs:
    def __init__(self, environment: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.stages.vllm_programs"],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: object, environment: dict[str, str], log: Path) -> int:
        """A module with its arguments; its number, to ask for its end by."""
        variables = {**environment, "OMP_NUM_THREADS": "1", LOG: str(log)}
        return self._ask("start", list(map(str, words)), variables)

    def wait(self, number: int) -> int | None:
        """Its exit status; it is killed if it does not end."""
        return self._ask("wait", number)

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(TIMEOUT_S)
        self._server.stdout.close()

    def _ask(self, *request: object) -> Any:
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the process that starts programs is gone"
        return json.loads(answer)


def become(
    environment: dict[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Do something with these variables and their output, and fork from where this was forked."""
    output = os.open(environment[LOG], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    # By itself a forked process would start a server of its own, which imports everything anew.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = environment[FORKED_FROM], lambda: None
    target(*args, **kwargs)


def run_module(name: str, *words: str) -> None:
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def serve() -> None:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.stages.vllm_preloaded"])
    forkserver.ensure_running()
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    programs: list[Any] = []
    try:
        for line in sys.stdin:
            what, *request = json.loads(line)
            if what == "start":
                words, environment = request
                environment[FORKED_FROM] = address
                task = (environment, run_module, tuple(words), {})
                programs.append(forks.Process(target=become, args=task))
                programs[-1].start()
                answer = len(programs) - 1
            else:
                program = programs[request[0]]
                program.join(TIMEOUT_S)
                answer = program.exitcode
            print(json.dumps(answer), flush=True)
    finally:
        for program in programs:
            program.kill()
            program.join()


if __name__ == "__main__":
    serve()
