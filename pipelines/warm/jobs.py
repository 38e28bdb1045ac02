"""A stage's job in a forked process."""

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository
from pipelines.config.profiles import Resources, thread_variables
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger.entry import Attempt
from pipelines.warm.child import Request
from pipelines.warm.client import Forked, fork, prepare
from pipelines.warm.identity import Identity, Kind, is_switched_off


def fork_job(repository: Repository, attempt: Attempt, resources: Resources) -> Forked | None:
    """Start the attempt's job; its process, or None where a fresh one has to be started."""
    if is_switched_off() or resources.setup:
        return None
    identity = _identity(attempt.launched.code, resources, os.environ)
    gpus = ",".join(map(str, range(resources.gpus_per_node)))
    request = Request.from_here(
        "pipelines.worker.worker",
        [str(attempt.folder)],
        {**identity.environment, "CUDA_VISIBLE_DEVICES": gpus},
        str(repository.root),
        minutes=resources.time_minutes,
    )
    with ExitStack() as files:
        opened = [
            files.enter_context(Path(os.devnull).open("rb")),
            files.enter_context(open_log(attempt.folder / "job_0_log.out")),
            files.enter_context(open_log(attempt.folder / "job_0_log.err")),
        ]
        return fork(repository, identity, request, [file.fileno() for file in opened])


def prepare_jobs(
    repository: Repository, resources: Resources, environment: Mapping[str, str]
) -> None:
    """Have a server start for the stages that a command with this environment will run."""
    if is_switched_off() or resources.setup:
        return
    with suppress(OSError):
        prepare(repository, _identity(take_snapshot(repository), resources, environment))


def _identity(code: Path, resources: Resources, environment: Mapping[str, str]) -> Identity:
    # The job imports the code as it is now, and no other: not that of the folder it starts in.
    ours = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    python = shlex.split(resources.python) if resources.python else [sys.executable]
    variables = {**environment, **thread_variables(resources), **ours}
    return Identity(Kind.COMPUTE, tuple(python), code, variables)
