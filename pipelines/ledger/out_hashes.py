"""The hash of every file of a finished job's outputs, kept beside them in the entry's `out`.

Each goes with the signature that the file had when it was hashed, so that it says nothing about a
file that anybody has touched since. Losing the list, or any line of it, costs only time.
"""

from collections.abc import Mapping
from pathlib import Path

from pipelines.base import atomic
from stages.signature import Known, Signature, signature_of

_NAME = "hashes"
"""Among the outputs, where no stage has one of this name."""


def write(out: Path, known: Mapping[Path, Known]) -> None:
    lines = {
        path.relative_to(out).as_posix(): [*signature, md5]
        for path, (signature, md5) in known.items()
    }
    atomic.write_json(out / _NAME, lines)


def read(out: Path) -> dict[Path, Known]:
    """Those of files that are still as they were."""
    try:
        lines = atomic.read_json(out / _NAME) or {}
        known = {out / name: Known(Signature(*line[:4]), line[4]) for name, line in lines.items()}
    except (ValueError, TypeError, AttributeError, LookupError):
        return {}  # not as it was written: no reason to lose what it is about
    return {path: each for path, each in known.items() if signature_of(path) == each.signature}
