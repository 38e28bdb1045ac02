"""Memory that a job has freed stays its own, for what it allocates next.

By default the C library gives the end of its heap back to the system whenever more than a few
megabytes of it are free: at every optimizer step on the CPU all activations go, and come back page
by page, each one a fault and zeros to be written. This is execution: no stage imports it, and it
changes no number.
"""

import ctypes
from contextlib import suppress

KEPT = 256 * 2**20
"""Bytes at the end of the heap that stay with the process while they are free."""
MAPPED = 32 * 2**20
"""An allocation from this size on is mapped by itself, and goes back as it is freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """In this process, from now on; does nothing where the C library is not GNU's."""
    with suppress(AttributeError, OSError, TypeError):
        options = ctypes.CDLL(None).mallopt
        options(_M_TRIM_THRESHOLD, KEPT)
        options(_M_MMAP_THRESHOLD, MAPPED)
