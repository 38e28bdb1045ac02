"""The dtype of weights, from the headers of their files: no torch is needed."""

import json
from collections.abc import Iterable
from pathlib import Path

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def types_of(files: Iterable[Path]) -> str:
    """The dtypes of safetensors files: `float32`, or `bfloat16 and float32`."""
    dtypes = {
        tensor["dtype"]
        for path in files
        for name, tensor in _header(path).items()
        if name != "__metadata__"
    }
    return " and ".join(sorted(NAMES.get(kind, kind.lower()) for kind in dtypes))


def _header(path: Path) -> dict[str, dict[str, str]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, str]] = json.loads(file.read(length))
    return header
