"""A node as its operating system describes it, to be held against the profile and the others."""

import os
import platform
import resource
import shutil
import time
from typing import Any

from pipelines.base.gpus import gpus_here
from pipelines.base.memory_limits import machine_memory, memory_limits
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
CLOCK_ROUNDS = 5


def describe(ctx: Context, deterministic: bool) -> dict[str, Any]:
    """What one rank sees."""
    return {
        **environment.describe(ctx, deterministic),
        "kernel": platform.release(),
        "allowed_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": machine_memory(),
        "memory_limit_bytes": min(memory_limits(), default=None),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "slurm_commands": all(map(shutil.which, ("squeue", "scontrol"))),
        "gpus": gpus_here(_ASKED),
    }


def clock_offset(ranks: Meeting) -> float:
    """Seconds that this rank's clock is ahead of rank 0's, as far as a meeting can tell."""
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        ranks.gather(None)
        mine = time.time()
        offsets.append(float(mine - ranks.gather(mine)[0]))
    return min(offsets, key=abs)
