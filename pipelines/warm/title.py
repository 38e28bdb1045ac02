"""What `ps` says of a forked process: its own command, not that of the process it came from.

People find a stage's process by it, and so do commands that look for a job nobody has noted yet.
"""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

ROOM = "-" * 2000
"""A last word for a server's command line, so that its children have room for theirs."""
_ARGUMENTS = slice(45, 47)
"""Where /proc/PID/stat has the command line's first and last address, after the name."""


def set_title(words: list[str]) -> None:
    """Become these words on every list of processes; where that cannot be done, nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, ValueError):
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        start, end = map(int, stat.rpartition(")")[2].split()[_ARGUMENTS])
        if start:
            # As after setproctitle: a last byte that is not zero says that the first one ends it.
            text = " ".join(words).encode()[: end - start - 2].ljust(end - start - 1, b"\0") + b"."
            ctypes.memmove(start, text, end - start)
