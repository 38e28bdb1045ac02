"""The most memory that some work had in use: of the GPU by torch's count, of the host by three.

`host_in_use_gib` is what the machine had in use beyond what it had before, caches of files left
out; `rss_gib` what belonged to the process, which memory that is pinned for a GPU need not count
to; `pinned_gib` is that memory, as torch rounds it up, and `pinning_seconds` what it took to get.
"""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GIB = 2**30
EVERY_S = 0.2


@contextmanager
def peaks() -> Iterator[dict[str, Any]]:
    """Of what is done inside; the numbers are there when it is over."""
    import psutil

    found: dict[str, Any] = {}
    cuda = torch.cuda.is_available()
    before = most = psutil.virtual_memory().used
    over = threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(EVERY_S):
            most = max(most, psutil.virtual_memory().used)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        yield found
    finally:
        over.set()
        watching.join()
        found["host_in_use_gib"] = round((most - before) / GIB, 2)
        found["rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        if cuda:
            found["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
            pinned = getattr(torch.cuda, "host_memory_stats", dict)()
            found["pinned_gib"] = round(pinned.get("allocated_bytes.current", 0) / GIB, 2)
            found["pinning_seconds"] = round(pinned.get("host_alloc_time.total", 0) / 1e6, 1)
