"""Notes what a process of a job takes, while it runs: for `lockstep cost`, and for nothing else.

A thread takes a reading every few seconds and leaves it in the attempt's folder (ledger/usage.py).
Whatever goes wrong in it, the stage does not notice: a reading that fails is left out.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from pipelines.base.nvml import Reader, gpu_reader
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.task import Task
from pipelines.ledger.usage import Usage, usage_file

FIRST_S, GROWTH, LONGEST_S = 1.0, 1.5, 15.0
"""Until the next reading: a stage that is killed early has said something, too."""
LAST_S = 10.0
"""How long the end of the process waits for the last reading."""
_START = "SLURM_JOB_START_TIME"
"""Newer Slurms set it: before the worker begins, images are fetched and Python starts."""
_DEEPEST = 5
"""Of folders in the scratch that have results of their own: steps/N/parts/PASS."""


class Meter:
    """The readings of one process.

    The stage's thread sets what it knows; the other one reads and writes. Neither waits for the
    other, so a disk that hangs here does not hold up the stage.
    """

    def __init__(self, path: Path, task: Task, launch: Launch, scratch: Path) -> None:
        now = time.time()
        self._path = path
        # Ranks share a scratch, and one of them tells what is saved there.
        self._scratch = scratch if task.leads else None
        self._before = _seconds_before(task, now)
        self._clock = time.monotonic()
        self._known = self._saved()
        self._gpus = _reader(task, launch)
        self._busy = 0.0
        self._start_up: float | None = None
        self._state: State | TaskState | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="meter", daemon=True)
        self._usage = Usage(
            job=task.job,
            restart=task.restart,
            host=socket.gethostname(),
            begun=now - self._before,
            seconds=self._before,
        )

    @property
    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._clock

    def _saved(self) -> frozenset[tuple[str, int]]:
        return _saved(self._scratch) if self._scratch else frozenset()

    def stage_begins(self) -> None:
        """What came before, imports and checks of the inputs, is done again after a kill."""
        self._start_up = self._seconds

    def begin(self) -> None:
        self._thread.start()

    def end(self, state: State | TaskState | None) -> None:
        """The process is about to end, in this way if it is known."""
        self._state = self._state or state
        self._over.set()
        self._thread.join(LAST_S)

    def _keep_reading(self) -> None:
        """Until it is told to stop. First that it has begun, the last reading is of the end."""
        pause, last = FIRST_S, False
        self._note()
        while not last:
            last = self._over.wait(pause)
            # One that fails is left out.
            with suppress(Exception):
                self._usage = self._read()
            self._note()
            pause = min(pause * GROWTH, LONGEST_S)

    def _note(self) -> None:
        with suppress(Exception):  # a disk without room, say
            files.write(self._path, self._usage)

    def _read(self) -> Usage:
        usage, seconds = self._usage, self._seconds
        saved = self._saved()
        if saved - self._known:
            usage = replace(usage, saved=seconds)
        self._known = saved
        readings = self._gpus()
        busy = [each.busy_percent for each in readings if each.busy_percent is not None]
        if busy:
            self._busy += sum(busy) / len(busy)
            count = usage.gpu_readings + 1
            usage = replace(usage, gpu_readings=count, gpu_busy=round(self._busy / count, 1))
        full = [each.memory_bytes for each in readings if each.memory_bytes is not None]
        if full:
            usage = replace(usage, gpu_memory_peak=max(usage.gpu_memory_peak or 0, *full))
        return replace(
            usage,
            seconds=seconds,
            start_up=self._start_up,
            state=self._state,
            memory_peak=max(usage.memory_peak, _memory()),
        )


@contextmanager
def metered(attempt: Attempt, task: Task, launch: Launch) -> Iterator[Meter]:
    """Around all that a process does in its job."""
    meter = Meter(usage_file(attempt, task), task, launch, attempt.entry.folder / "scratch")
    meter.begin()
    try:
        yield meter
    finally:
        meter.end(None)


def _seconds_before(task: Task, now: float) -> float:
    """How long the job has had its nodes, where Slurm says so, by clocks that may differ a bit."""
    started = os.environ.get(_START, "")
    if task.job is None or not started.isdigit():
        return 0.0
    return max(now - float(started), 0.0)


def _reader(task: Task, launch: Launch) -> Reader:
    """One process reads all GPUs that its job has on its node; where there are none, nothing."""
    resources = launch.resources
    gpus = launch.gpus_per_job // resources.nodes
    if task.local_rank or not gpus:
        return list
    first = int(resources.device.partition(":")[2] or 0)
    return gpu_reader(os.environ.get("CUDA_VISIBLE_DEVICES"), first, gpus)


def _memory() -> int:
    """Bytes of this process and its children; pages that they share count for each."""
    total, me = 0, psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _saved(folder: Path, depth: int = 0) -> frozenset[tuple[str, int]]:
    """What tells that something was saved: the names of what is there, and when it last changed.

    What is still being written has a name that begins with a dot.
    """
    found: set[tuple[str, int]] = set()
    with suppress(OSError):
        known = folder.stat()
        # A folder without folders: there may be thousands of results in it, so it is not listed.
        if depth and known.st_nlink == 2:
            return frozenset({(str(folder), known.st_mtime_ns)})
        for each in os.scandir(folder):
            if each.name.startswith("."):
                continue
            is_folder = each.is_dir(follow_symlinks=False)
            found.add((each.path, 0 if is_folder else each.stat().st_mtime_ns))
            whole = each.name.startswith("checkpoint-")
            if is_folder and not whole and depth < _DEEPEST:
                found |= _saved(Path(each.path), depth + 1)
    return frozenset(found)
