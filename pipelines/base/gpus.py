"""The GPUs of this machine, as nvidia-smi describes them."""

import subprocess
from collections.abc import Sequence

TIMEOUT_S = 60.0


def gpus_here(fields: Sequence[str]) -> list[dict[str, str]]:
    """These fields (`nvidia-smi --help-query-gpu`) of each GPU; nothing where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(fields, row, strict=False)) for row in rows]
