"""What every recorded number comes with: the hardware, the versions, and a place in results/."""

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def hardware(device: str) -> str:
    """The GPU, or the machine for what runs on its CPU."""
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else machine()


def versions(*names: str) -> dict[str, str]:
    """Of Python, and of those of the named packages that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def recorded(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all: a script may be killed when its time is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def report(name: str, result: Mapping[str, Any], *, to_file: bool) -> None:
    """Print the result of a script, and record it in results/NAME.json if asked to."""
    print(json.dumps(result, indent=2))
    if to_file:
        write(RESULTS / f"{name}.json", result)


def add(path: Path, key: str, result: Mapping[str, Any]) -> None:
    """Record one result beside those that are there, in the order of their keys."""
    write(path, dict(sorted({**recorded(path), key: result}.items())))
