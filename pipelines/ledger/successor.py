"""successor.json: the submission that goes on with an attempt which Slurm ends before it is done.

It waits in the queue for that, and leaves the queue unseen where the attempt ends well.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Successor:
    VERSION: ClassVar[int] = 1

    folder: Path
