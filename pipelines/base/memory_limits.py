"""How much memory this process may use: the machine's, and what control groups leave of it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_UNLIMITED = 1 << 60


def machine_memory() -> int:
    """Bytes that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limits() -> Iterator[int]:
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
