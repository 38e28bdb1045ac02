"""What GPUs do at a moment, asked of NVIDIA's own library: cheap enough for every few seconds.

`gpus_here` starts nvidia-smi, which takes a second and a process; this takes neither. Without the
library, a driver or a GPU there is nothing to read, and no reading ever raises.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Busy(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


@dataclass(frozen=True)
class GpuReading:
    """One GPU at a moment; a part of a GPU (MIG) has no utilisation."""

    busy_percent: float | None
    memory_bytes: int | None


Reader = Callable[[], list[GpuReading]]


def gpu_reader(visible: str | None, first: int, count: int) -> Reader:
    """Reads so many from there on of the GPUs that CUDA_VISIBLE_DEVICES names; if it is not set,
    of all."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        handles = _handles(library, visible) if library.nvmlInit_v2() == 0 else []
    except (OSError, AttributeError):
        return list
    return lambda: [_read(library, handle) for handle in handles[first : first + count]]


def named_gpus(visible: str | None, count: int) -> list[int | str]:
    """The GPUs that CUDA would use, by number or name; like CUDA, none after a wrong one."""
    if visible is None:
        return list(range(count))
    named: list[int | str] = []
    for word in map(str.strip, visible.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            named.append(word)
        elif word.isdigit() and int(word) < count:
            named.append(int(word))
        else:
            break
    return named


def _handles(library: Any, visible: str | None) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    handles = []
    for gpu in named_gpus(visible, count.value):
        handle = ctypes.c_void_p()
        place = ctypes.byref(handle)
        if isinstance(gpu, int):
            failed = library.nvmlDeviceGetHandleByIndex_v2(gpu, place)
        else:
            failed = library.nvmlDeviceGetHandleByUUID(gpu.encode(), place)
        if not failed:
            handles.append(handle)
    return handles


def _read(library: Any, handle: ctypes.c_void_p) -> GpuReading:
    busy, memory = _Busy(), _Memory()
    is_busy = uses = None
    with suppress(AttributeError):  # an older library
        if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0:
            is_busy = float(busy.gpu)
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            uses = int(memory.used)
    return GpuReading(is_busy, uses)
