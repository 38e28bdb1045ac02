"""What a job uses on this node now, as a line of JSON: run by srun inside the job.

The job's processes are those with its number in their environment, this one apart. Their cores are
counted over a moment.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from pipelines.base.gpus import gpus_here

GPU = ("index", "name", "utilization.gpu", "memory.used", "memory.total")
MOMENT_S = 1.0
_MIB = 1 << 20


def usage(variables: Mapping[str, str]) -> dict[str, Any]:
    """Of the job that these variables are of."""
    processes = _processes(variables.get("SLURM_JOB_ID", ""))
    before, begun = _seconds(processes), time.monotonic()
    time.sleep(MOMENT_S)
    after, passed = _seconds(processes), time.monotonic() - begun
    still = before.keys() & after.keys()
    return {
        "host": socket.gethostname(),
        "processes": len(after),
        "cores": round(sum(after[pid] - before[pid] for pid in still) / passed, 2),
        "memory_bytes": sum(_memory(process) for process in processes),
        "gpus": [_gpu(seen) for seen in gpus_here(GPU)],
    }


def _processes(job: str) -> list[psutil.Process]:
    mine = {os.getpid(), os.getppid()}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in mine and process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
    return found


def _seconds(processes: list[psutil.Process]) -> dict[int, float]:
    """What each has computed since it began."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _gpu(seen: Mapping[str, str]) -> dict[str, Any]:
    """Numbers where nvidia-smi says some; a part of a GPU (MIG) has no utilisation."""
    return {
        "index": seen["index"],
        "name": seen.get("name", ""),
        "busy_percent": _number(seen.get("utilization.gpu")),
        "memory_bytes": _bytes(seen.get("memory.used")),
        "memory_total_bytes": _bytes(seen.get("memory.total")),
    }


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _bytes(mebibytes: str | None) -> int | None:
    number = _number(mebibytes)
    return None if number is None else int(number * _MIB)


if __name__ == "__main__":
    print(json.dumps(usage(os.environ)))
