"""How a command asks to stop waiting for its running stages: a file that their drivers look at.

A signal can come before its receiver listens, and dvc stands between the command and the drivers.
A file waits until it is read.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pipelines.base.repository import Repository
from pipelines.ledger import files


class StopRequest(StrEnum):
    """How the jobs of an invocation shall end for it."""

    CANCEL = "cancel"
    DETACH = "detach"
    """The drivers let go and the jobs go on."""


@dataclass(frozen=True)
class _Written:
    VERSION: ClassVar[int] = 1

    request: StopRequest


def request_stop(repository: Repository, invocation: str, request: StopRequest) -> None:
    files.write(_path(repository, invocation), _Written(request))


def stop_request_of(repository: Repository, invocation: str) -> StopRequest | None:
    """How the command behind this invocation asks to be left, if it does."""
    written = files.read(_Written, _path(repository, invocation))
    return written.request if written else None


def _path(repository: Repository, invocation: str) -> Path:
    return repository.home / "runs" / invocation / "stop_request.json"
