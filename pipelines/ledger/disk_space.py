"""Whether there is room left for a job's files: one that finds none cannot even say so."""

import errno
from contextlib import suppress
from pathlib import Path

from pipelines.ledger.entry import Attempt
from pipelines.ledger.logs import lines_of

_PROBE = ".room"
_FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
}


def no_room(attempt: Attempt) -> str | None:
    """That the disk is full, and where, if it is or the job's log says that it was."""
    if refusal := _refused(attempt.folder / _PROBE):
        return f"{refusal}: {attempt.folder}"
    for path in attempt.logs():
        for line in reversed(lines_of(path)):
            if any(words in line for words in _FULL.values()):
                return f"{line.strip()} (in {path})"
    return None


def _refused(probe: Path) -> str | None:
    """What the system says to a small file, where it has no room for it."""
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return _FULL.get(error.errno or 0)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
