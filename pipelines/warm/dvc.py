"""DVC in a forked process, and the driver of its stage in a fork of that.

DVC runs a stage's command in a shell. Where the command is ours, to the letter, the driver is
forked instead: a process below DVC like the other, with the same folder and variables, that has
imported everything already. What DVC does over and over for each stage is done once: YAML is parsed
and written where it has changed (dvc_yaml.py), and which files git tracks is read once for each
index that git has written (git_index.py).
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dvc.stage.run
from dvc.stage.exceptions import StageCmdFailedError

from pipelines.base.repository import Repository
from pipelines.dvc_repo import handover
from pipelines.warm.child import forget_files
from pipelines.warm.dvc_yaml import use_quick_yaml
from pipelines.warm.git_index import read_index_once
from pipelines.warm.stage import run_command
from pipelines.warm.title import set_title

_COMMAND = ["python", "-m", "pipelines", "stage"]


def run_dvc(arguments: list[str]) -> int:
    """What `python -m dvc` does."""
    from dvc.cli import main

    _fork_drivers()
    use_quick_yaml()
    read_index_once()
    return int(main(arguments) or 0)


def _fork_drivers() -> None:
    in_a_shell: Callable[..., None] = dvc.stage.run._run

    def run(executable: str, command: str, **options: Any) -> None:
        words = command.split()
        if words[:-1] == _COMMAND:
            _run_driver(command, words, options["cwd"], options["env"])
        else:
            in_a_shell(executable, command, **options)

    dvc.stage.run._run = run


def _run_driver(command: str, words: list[str], folder: str, environment: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be_driver(words, folder, environment)
    # As with any command of a stage: Ctrl-C is for the driver, which ends the job in order.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    if code := os.waitstatus_to_exitcode(status):
        raise StageCmdFailedError(command, code)
    handover.take(Repository(Path(folder)), words[-1])


def _be_driver(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Never returns: the frames below this one are DVC's."""
    status = 1
    try:
        forget_files()
        set_title([sys.executable, *words[1:]])
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.environ[handover.DVC_TAKES_THEM] = "1"
        sys.argv = words[2:]
        status = run_command(words[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
