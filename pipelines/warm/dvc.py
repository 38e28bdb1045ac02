"""DVC in a forked process, and the driver of its stage in a fork of that.

DVC runs a stage's command in a shell. Where the command is ours, to the letter, the driver is
forked instead: a process below DVC like the other, with the same folder and variables, that has
imported everything already. And dvc.lock is read by the quick loader: no person writes into it, so
there are no comments to keep, for which DVC takes a loader that is twenty times slower. Which files
git tracks is read once for each index that git has written: DVC reads it anew for every output.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dvc.dvcfile
import dvc.stage.run
from dvc.stage.exceptions import StageCmdFailedError
from dvc.utils.serialize._common import _modify_data
from dvc.utils.serialize._yaml import _dump, parse_yaml

from pipelines.base.repository import Repository
from pipelines.dvc_repo import handover
from pipelines.warm.child import forget_files
from pipelines.warm.git_index import read_index_once
from pipelines.warm.stage import run_command
from pipelines.warm.title import set_title

_COMMAND = ["python", "-m", "pipelines", "stage"]


def run_dvc(arguments: list[str]) -> int:
    """What `python -m dvc` does."""
    from dvc.cli import main

    _fork_drivers()
    _read_lock_quickly()
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


def _read_lock_quickly() -> None:
    keeping_comments = dvc.dvcfile.modify_yaml

    @contextmanager
    def modify(path: str, fs: Any = None) -> Iterator[dict[str, Any]]:
        if Path(path).name != "dvc.lock":
            with keeping_comments(path, fs=fs) as data:
                yield data
        else:
            with _modify_data(path, parse_yaml, _dump, fs=fs) as data:
                yield data

    dvc.dvcfile.modify_yaml = modify


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
