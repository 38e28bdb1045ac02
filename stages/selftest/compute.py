"""How fast a GPU, or the cores of a process, multiply matrices, and whether the product is right.

The factors come from a seed, so all GPUs of one kind must give the same bits, every time.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZES = {"cuda": 8192, "cpu": 512}
SECONDS = 1.0
"""For how long products are computed, after the first ones."""
CHECKED_ROWS = 8
"""So many rows of the product are compared with what float64 gives."""


def matmul_rate(device: str, seconds: float = SECONDS) -> dict[str, Any]:
    """TFLOP/s, the largest error relative to the largest number, and a digest of the product."""
    kind = device.partition(":")[0]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    size = SIZES[kind]
    generator = torch.Generator().manual_seed(11)
    left, right = (
        torch.randn(size, size, generator=generator).to(dtype).to(device) for _ in range(2)
    )
    wait: Callable[[], None] = (
        (lambda: torch.cuda.synchronize(device)) if kind == "cuda" else lambda: None
    )
    first = left @ right
    wait()
    count, repeats, started = 0, True, time.monotonic()
    while (passed := time.monotonic() - started) < seconds or not count:
        product = left @ right
        wait()
        count += 1
    repeats = torch.equal(product, first)
    return {
        "tflops": 2.0 * size**3 * count / passed / 1e12,
        "error": _error(left, right, product),
        "repeats": repeats,
        "digest": hashlib.sha256(product.cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
        "dtype": str(dtype).removeprefix("torch."),
        "size": size,
        **(_gpu(device) if kind == "cuda" else {"threads": torch.get_num_threads()}),
    }


def _error(left: Tensor, right: Tensor, product: Tensor) -> float:
    expected = left[:CHECKED_ROWS].cpu().double() @ right.cpu().double()
    difference = (product[:CHECKED_ROWS].cpu().double() - expected).abs().max()
    return float(difference / expected.abs().max())


def _gpu(device: str) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(device)
    return {
        "gpu": about.name,
        "memory": about.total_memory,
        "uuid": str(getattr(about, "uuid", "")),
        "visible": torch.cuda.device_count(),
    }
