"""A node as its operating system describes it, to be held against the profile and the others."""

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base.gpus import gpus_here
from pipelines.identity import environment
from pipelines.selftest.disk import Meeting
from stages.context import Context

_ASKED = (
    "index",
    "name",
    "memory.total",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
)
_UNLIMITED = 1 << 60
CLOCK_ROUNDS = 5


def describe(ctx: Context, deterministic: bool) -> dict[str, Any]:
    """What one rank sees."""
    return {
        **environment.describe(ctx, deterministic),
        "kernel": platform.release(),
        "allowed_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_limit_bytes": min(_memory_limits(), default=None),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "slurm_commands": all(map(shutil.which, ("squeue", "scontrol"))),
        "gpus": gpus_here(_ASKED),
    }


def _memory_limits() -> Iterator[int]:
    """Of this process's control group and those around it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
            if controllers and "memory" not in controllers.split(","):
                continue
            here = root / name.lstrip("/")
            for folder in (here, *here.parents):
                for file in ("memory.max", "memory.limit_in_bytes"):
                    with suppress(OSError, ValueError):
                        limit = int((folder / file).read_text(encoding="utf-8"))
                        if limit < _UNLIMITED:
                            yield limit
                if folder == root:
                    break


def clock_offset(ranks: Meeting) -> float:
    """Seconds that this rank's clock is ahead of rank 0's, as far as a meeting can tell."""
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        ranks.gather(None)
        mine = time.time()
        offsets.append(float(mine - ranks.gather(mine)[0]))
    return min(offsets, key=abs)
