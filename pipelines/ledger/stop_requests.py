"""How a command asks to stop waiting for its running stages: a file that their drivers look at.

A signal can come before its receiver listens, and dvc stands between the command and the drivers.
A file waits until it is read.
"""

from enum import StrEnum
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository


class StopRequest(StrEnum):
    """How the jobs of an invocation shall end for it."""

    CANCEL = "cancel"
    DETACH = "detach"
    """The drivers let go and the jobs go on."""


def request_stop(repository: Repository, invocation: str, request: StopRequest) -> None:
    atomic.write_json(_path(repository, invocation), {"request": request})


def stop_request_of(repository: Repository, invocation: str) -> StopRequest | None:
    """How the command behind this invocation asks to be left, if it does."""
    written = atomic.read_json(_path(repository, invocation))
    return StopRequest(written["request"]) if written else None


def _path(repository: Repository, invocation: str) -> Path:
    return repository.home / "runs" / invocation / "stop_request.json"
