"""What a job on Slurm checks of its nodes before its stage begins, and below what a node is bad."""

from pydantic import Field

from stages.contracts.base import Section

SIZE = r"^\d+[KMGTkmgt]?[Bb]?$"
"""Of a memory or disk: 64G; megabytes without a unit."""


class Preflight(Section):
    """The floors are low: they tell nodes on which a stage would fail or crawl from all others."""

    enabled: bool = True
    """Whether nodes are checked before a stage begins; it takes a second or two (no flag)."""
    exclude_at_most: int = Field(default=3, ge=0)
    """Maximum number of bad nodes that a stage leaves out before it fails (--exclude)."""
    seconds: float = Field(default=60.0, gt=0)
    """Seconds after which a check that has not come back counts as failed (no flag)."""
    disk_free: str = Field(default="100M", pattern=SIZE)
    """Room that the clone and the node's folder for temporary files must have (no flag)."""
    disk_write: float = Field(default=0.001, ge=0)
    """GB/s that a node must write into the clone, flushed, at best of three tries (no flag)."""
    gpu_used: str = Field(default="4G", pattern=SIZE)
    """Memory of a GPU that may be in use by others before the stage begins (no flag)."""
    collective: float = Field(default=0.01, ge=0)
    """GB/s of an all-reduce within a node, and between two, at best of three tries (no flag)."""
    clock_seconds: float = Field(default=10.0, gt=0)
    """Seconds that the clocks of a job's nodes may be apart (no flag)."""
