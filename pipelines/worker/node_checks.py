"""One node before a stage begins: the clone, the disks, memory, GPUs. Each check is a function.

What is wrong is put in words, and each fault found counts; there is nothing to be done about it but
to go elsewhere. What no other node would have better, room in the clone, is an error of the stage.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.disk_speed import free_bytes, write_speed
from pipelines.base.memory_limits import machine_memory, memory_limits
from pipelines.config.profiles import Resources, bytes_of
from pipelines.ledger.task import Task
from pipelines.worker.gpu_checks import (
    asks_for_gpus,
    visible_here,
    wrong_with_cuda,
    wrong_with_gpus,
)
from stages.context import StageError

TRIES = 3
"""A machine may stall for a moment: only what is slow each time is slow."""
_LEAST_OF_MEMORY = 0.97
_OF_A_NODE = (
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
    *(errno.EHOSTUNREACH, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.EREMOTEIO),
)
"""What reading says where a file system cannot be reached from here."""


def check_node(
    folder: Path, paths: list[Path], resources: Resources, task: Task
) -> tuple[list[str], dict[str, Any]]:
    """What is wrong here, and what was measured; what concerns the node is one process's to do.

    `folder` is the job's, in the clone; `paths` are what it is about to read there.
    """
    wrong: list[str] = []
    measured: dict[str, Any] = {}
    floors = resources.preflight
    on_gpus = resources.device.startswith("cuda") and asks_for_gpus(resources)
    if task.local_rank == 0:
        wrong += wrong_with_clone(paths)
        speed = _write(folder, floors.disk_write, wrong)
        measured |= {"disk_write": speed} if speed else {}
        wrong += wrong_with_temporary(bytes_of(floors.disk_free))
        wrong += wrong_with_memory(bytes_of(resources.memory))
        if on_gpus:
            wrong += wrong_with_gpus(resources, visible_here())
        refuse_full_clone(folder, floors.disk_free)
    if on_gpus:
        wrong += wrong_with_cuda(task, resources, floors.seconds)
    return wrong, measured


def wrong_with_clone(paths: list[Path]) -> Iterator[str]:
    """Whether what the job reads can be read: a mount may be stale, or cut off.

    What is gone, or not ours to read, is so on every node, and whoever reads it says it better.
    """
    for path in paths:
        try:
            _touch(path)
        except OSError as error:
            if error.errno in _OF_A_NODE:
                yield f"the clone is not readable: {error.strerror}: {path}"
                return


def _touch(path: Path) -> None:
    """The first byte of a file; of a folder, that of the first file in it."""
    if path.is_dir():
        first = min((each.path for each in os.scandir(path)), default=None)
        if first is not None:
            _touch(Path(first))
        return
    with path.open("rb", buffering=0) as file:
        file.read(1)


def _write(folder: Path, floor: float, wrong: list[str]) -> float:
    """GB/s into the clone, at best."""
    probe = folder / f".preflight.{atomic.here()}.{os.getpid()}"
    best = 0.0
    try:
        for _ in range(TRIES):
            best = max(best, write_speed(probe, 0.0, 1))
            if best >= floor:
                return best
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(folder, error.strerror) from error
        wrong.append(f"it cannot write into the clone: {error.strerror}: {folder}")
        return 0.0
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    wrong.append(f"it writes {1e3 * best:.3g} MB/s into the clone, the floor is {1e3 * floor:g}")
    return best


def refuse_full_clone(folder: Path, floor: str) -> None:
    """All nodes share the clone, so there is no other to go to."""
    free = free_bytes(folder)
    if free < bytes_of(floor):
        raise _full(folder, f"{free >> 20} MB are free, `preflight.disk_free` is {floor}")


def _full(folder: Path, why: str | None) -> StageError:
    return StageError(
        f"no room in the clone for {folder}: {why}; free some space, or move the clone, then run "
        "the same command: progress is saved"
    )


def wrong_with_temporary(floor: int) -> Iterator[str]:
    """Where libraries put what they compile, and sockets: a disk or memory of the node's own."""
    try:
        folder = tempfile.gettempdir()
        free = free_bytes(Path(folder))
    except OSError as error:
        yield f"it has no folder for temporary files: {error}"
        return
    if free < floor:
        yield f"{free >> 20} MB are free in {folder}, the floor is {floor >> 20}"


def wrong_with_memory(asked: int) -> Iterator[str]:
    """Less than the profile asks for: a module may have failed, or the limit is another one."""
    has = min([machine_memory(), *memory_limits()])
    if has < _LEAST_OF_MEMORY * asked:
        yield f"it has {has / 1e9:.1f} GB of memory, `memory` is {asked / 1e9:.1f}"
