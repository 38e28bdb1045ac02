"""The context of one step among several that a stage takes in one process.

It is bound to the step's own iteration, and keeps a scratch of its own under the stage's. What the
step says about itself stays with the step: the stage speaks for all of them.

A step is *durable* when the state that it began with is on the disk. Then its units of work and its
optimizer steps are kept as those of a stage are, and it may be stopped anywhere. Otherwise nothing
inside it could be gone on from: nothing is written, and where the learners have begun to move it is
seen through to its end.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stages.context import Context


@dataclass
class StepContext(Context):
    durable: bool = True
    deaf: bool = False
    """Whether the step goes on though somebody asked to stop."""
    above: Context | None = None

    def should_stop(self) -> bool:
        return not self.deaf and super().should_stop()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def resume_at(self, step: int, history: Sequence[Mapping[str, float]] = ()) -> None:
        pass

    def progress(self, done: int, total: int, phase: str = "", **numbers: float) -> None:
        pass

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Of the latest step."""
        if self.above is not None:
            self.above.table(name, rows)


def step_context(ctx: Context, name: str, folder: Path, *, durable: bool) -> StepContext:
    """The context of the step that is the iteration `name`, in a folder of its own.

    Ranks share the step's units of work.
    """
    if not ctx.rank:
        if not durable:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    if ctx.ranks is not None:
        ctx.ranks.agree(f"step {name}")
    return bound_to_step(ctx, name, folder, durable=durable)


def bound_to_step(ctx: Context, name: str, folder: Path, *, durable: bool) -> StepContext:
    """The same on a rank that was told of the step: whoever tells has made the folder ready."""
    num_ranks = ctx.ranks.world if ctx.ranks is not None else 1
    same = {field.name: getattr(ctx, field.name) for field in fields(Context)}
    return StepContext(
        **same
        | {
            "key": name,
            "folder": folder,
            "checkpoint_seconds": ctx.checkpoint_seconds if durable else math.inf,
            "parts": None if durable else {},
            "local": None,
            "durable": durable,
            "rank": ctx.ranks.rank if ctx.ranks is not None else 0,
            "world": num_ranks,
            "above": ctx,
        }
    )
