"""`stage_in` of a profile: what a job reads from, or saves to, its node's own disk first.

Execution, not identity: the bytes are those of the shared folder, and where the disk has no room,
or is not there, the job uses the shared folder.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipelines.config.slurm_flags import Line
from stages.contracts.base import Section


class Staged(StrEnum):
    """What goes through the node's own disk."""

    INPUTS = "inputs"
    """Models and data, copied once a node and kept for the jobs after it."""
    CHECKPOINTS = "checkpoints"
    """Written there first, and copied to the shared folder while training goes on."""


class StageIn(Section):
    """The node's own disk, and what it is used for."""

    folder: Line = Field(min_length=1, pattern=r"^[/$]")
    """Folder on each node's own disk, such as /local or $TMPDIR: variables are the job's."""
    size: str = Field(pattern=r"^[1-9]\d*[KMGT]$")
    """The most that may lie there, such as 200G: the least recently used is removed for more."""
    what: list[Annotated[Staged, Field(strict=False)]] = Field(
        default=[Staged.INPUTS, Staged.CHECKPOINTS], min_length=1
    )
    """Of `inputs` and `checkpoints`, what goes through it."""
