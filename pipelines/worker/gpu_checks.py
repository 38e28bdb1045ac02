"""The GPUs of a node before a stage begins: there, free, without errors, at their clocks, at work.

What nvidia-smi tells is asked once a node; what it cannot tell, `[N/A]`, counts as well. Each rank
then has CUDA do something on the GPUs that it is about to use.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipelines.base.gpus import gpus_here
from pipelines.base.nvml import named_gpus
from pipelines.config.profiles import Resources, bytes_of
from pipelines.ledger.task import Task

_ASKED = (
    *("index", "uuid", "memory.total", "memory.used"),
    *("ecc.errors.uncorrected.volatile.total", "mig.mode.current"),
)
_THROTTLED = {
    "clocks_throttle_reasons.hw_slowdown": "slowed down by its hardware",
    "clocks_throttle_reasons.hw_thermal_slowdown": "slowed down, it is too hot",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "slowed down, its power is braked",
}
"""Asked for apart: a driver that does not know one of them answers nothing at all."""
LOOKS, PAUSE_S = 3, 1.0
_LEAST_OF_MEMORY = 0.9
"""Of what `gpu_memory` says: ECC takes a sixteenth of an L40S with 48G, and drivers keep some."""


def asks_for_gpus(resources: Resources) -> bool:
    """Whether the job has any: a stage that needs none may share the defaults of those that do."""
    flags = [resources.gres or "", *(f"{key}={value}" for key, value in resources.extra.items())]
    return bool(resources.gpus_per_node) or any(
        word in flag for flag in flags for word in ("gpu", "shard", "mps")
    )


def wrong_with_gpus(resources: Resources, visible: str | None) -> Iterator[str]:
    """Of this node's GPUs that the job has, by nvidia-smi: one process of a node asks."""
    if shutil.which("nvidia-smi") is None:
        return  # a container may do without
    asked = resources.gpus_per_node
    gpus = gpus_here(_ASKED)
    if not gpus:
        yield "nvidia-smi shows no GPU"
        return
    mine = _visible(gpus, visible)
    parts = [name for name in named_gpus(visible, len(gpus)) if str(name).startswith("MIG-")]
    if (num_visible := len(mine) + len(parts)) < asked:
        yield f"{num_visible} of {asked} GPUs are visible"
    # Where ranks share a GPU, one may be in the other's way, and is meant to be.
    shared = resources.tasks_per_node > max(asked, 1)
    for gpu in mine:
        yield from _wrong_with(gpu, resources, shared=shared)
    yield from _throttled(visible)


def _throttled(visible: str | None) -> list[str]:
    """What is so at each of some looks: a GPU may still be hot from the job before."""
    slow: list[str] = []
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE_S)
        slow = []
        for gpu in _visible(gpus_here(("index", "uuid", *_THROTTLED)), visible):
            active = [words for name, words in _THROTTLED.items() if gpu.get(name) == "Active"]
            # The first is said of any of the others, too.
            slow += [f"GPU {gpu['index']} is {active[-1]}"] if active else []
        if not slow:
            break
    return slow


def _wrong_with(gpu: Mapping[str, str], resources: Resources, *, shared: bool) -> Iterator[str]:
    name = f"GPU {gpu['index']}"
    total, used = (_mib(gpu.get(f"memory.{key}")) for key in ("total", "used"))
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors):
        yield f"{name} has {errors} uncorrected memory errors (ECC)"
    wanted = bytes_of(resources.gpu_memory)
    if total is not None and total < _LEAST_OF_MEMORY * wanted:
        yield f"{name} has {total / 1e9:.0f} GB of memory, `gpu_memory` is {resources.gpu_memory}"
    # What others use of a GPU that is split (MIG) is in parts of their own.
    shared = shared or gpu.get("mig.mode.current") == "Enabled"
    if not shared and used is not None and used > bytes_of(resources.preflight.gpu_used):
        yield f"{name} is not free: others use {used / 1e9:.1f} GB of its memory"


def _mib(text: str | None) -> int | None:
    return int(text) << 20 if text and text.isdigit() else None


def _visible(gpus: list[dict[str, str]], visible: str | None) -> list[dict[str, str]]:
    """Those that CUDA_VISIBLE_DEVICES names; of a part of a GPU (MIG) nvidia-smi says nothing."""
    names = named_gpus(visible, len(gpus))
    return [gpu for gpu in gpus if int(gpu["index"]) in names or gpu["uuid"] in names]


def wrong_with_cuda(task: Task, resources: Resources, timeout_s: float) -> Iterator[str]:
    """What CUDA says when this rank's GPUs are to do something."""
    own = gpus_of(task, resources)
    probe = Path(__file__).with_name("cuda_probe.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(probe), *map(str, own)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"CUDA hangs: nothing from GPU {', '.join(map(str, own))} in {timeout_s:g} s"
        return
    if done.returncode or done.stdout:
        yield (done.stdout or done.stderr).strip() or f"CUDA ends with status {done.returncode}"


def gpus_of(task: Task, resources: Resources) -> list[int]:
    """A rank has one, like `Task.device`; the only process of a node has all."""
    count, tasks = resources.gpus_per_node or resources.tasks_per_node, resources.tasks_per_node
    return [task.local_rank % count] if tasks > 1 else list(range(count))


def visible_here() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")
