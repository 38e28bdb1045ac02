"""The checkpoints of one training: in the scratch at once, or by way of the node's own disk.

With a local disk, training waits only for the write to that disk; the copy to the scratch, which
all nodes share, is made while it goes on (drain.py). Always true:
- The next checkpoint is not begun before the one before it is in the scratch, and is begun as much
  earlier as that one's copy took: it shall be there after `checkpoint_seconds`, since what counts
  is what the loss of the node leaves. Copies that take longer than that follow on each other.
- Who stops because it is told to, or is done, leaves its last checkpoint in the scratch.
- Whoever resumes takes the newest whole one, of its node's disk or of the scratch. One that is only
  on the disk is copied at once: a second kill does not cost what the first one did not.
- A local disk that is full or fails is a warning: the checkpoint goes to the scratch directly.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.checkpoint import begin_aside, checkpoint_of, file_names, save_on_node
from stages.context import Context, Stopped
from stages.engines.processes.ranks import ALONE, Ranks
from stages.engines.training.drain import Drain
from stages.engines.training.learner import AnyLearner
from stages.engines.training.resume import Metrics, resume, save_if_possible, tensors_of


class Checkpoints:
    """All ranks have one, and call the same of its methods, but for `is_time`."""

    def __init__(
        self,
        ctx: Context,
        learners: Mapping[str, AnyLearner],
        ranks: Ranks = ALONE,
        part: str = "",
    ) -> None:
        """`part` names a training within the stage that keeps its own."""
        self._learners, self._ranks = learners, ranks
        self._scratch = ctx.scratch / part
        self._scratch.mkdir(exist_ok=True)
        self._local = ctx.local and replace(ctx.local, folder=ctx.local.folder / part)
        self._drain: Drain | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last one is in the scratch then, or stays on the node if other ranks are gone."""
        if error is None:
            self.settle()
        elif self._drain and (isinstance(error, Stopped) or self._ranks.world == 1):
            # Ranks that stop may come here one by one: each sees to its own files.
            self._finish(self._drain.join)
        elif self._drain:
            self._drain.end()

    def is_time(self, waited: float, interval: float) -> bool:
        """Of rank 0: whether to begin the next, so many seconds after the last was written."""
        if self._drain is None:
            return waited >= interval
        return self._drain.is_over and waited + self._drain.seconds >= interval

    def resume(
        self, fits: Callable[[Mapping[str, Any]], bool] = lambda _: True
    ) -> tuple[list[Metrics], Mapping[str, Any]]:
        """Go on from the newest checkpoint that is whole: see resume.py."""
        on_node = self._local.folder if self._local and self._local.num_nodes == 1 else None
        history, values = resume(self._scratch, self._learners, self._ranks, fits, on_node)
        if history and on_node:
            self._drain_what_was_found(on_node, len(history))
        return history, values

    def _drain_what_was_found(self, on_node: Path, step: int) -> None:
        """Rank 0 copies all of it, where the scratch does not have it."""

        def missing() -> list[str]:
            there = checkpoint_of(self._scratch, step).exists()
            return [] if there else file_names(checkpoint_of(on_node, step))

        try:
            if names := self._ranks.first_does(missing):
                self._begin_to_drain(step, [] if self._ranks.rank else names)
        except OSError as error:
            self._warn(f"the checkpoint of step {step} is on this node's own disk only: {error}")

    def save(self, history: list[Metrics], more: Mapping[str, Any] | None = None) -> bool:
        """A checkpoint of now; whether it was written. `more` comes back beside the history."""
        self.settle()
        if self._local is not None:
            step, values = len(history), {**(more or {}), "history": history}
            try:
                own = save_on_node(
                    self._local, step, *tensors_of(self._learners), values, self._ranks
                )
                self._begin_to_drain(step, own)
            except OSError as error:
                self._warn(f"the checkpoint of step {step} goes to the shared folder only: {error}")
            else:
                return True
        return save_if_possible(self._scratch, self._learners, history, more, self._ranks)

    def settle(self) -> None:
        """Wait until the last checkpoint is in the scratch; all ranks do."""
        if self._drain:
            self._finish(self._drain.settle)

    def _finish(self, wait: Callable[[], bool]) -> None:
        drain, self._drain = self._drain, None
        assert drain
        if not self._ranks.rank and not drain.is_over:
            print(f"step {drain.step} is saved on this node, and is being copied", flush=True)
        if not wait():
            self._warn(
                f"the checkpoint of step {drain.step} is on this node's own disk only "
                f"({drain.error}): the loss of the node costs the work since the one before; make "
                "room on the disk that holds .lockstep"
            )

    def _begin_to_drain(self, step: int, own: list[str]) -> None:
        assert self._local
        self._ranks.first_does(lambda: begin_aside(self._scratch, step))
        scratch = self._ranks.same(self._scratch)
        on_node = checkpoint_of(self._local.folder, step)
        self._drain = Drain(on_node, scratch, step, own, self._ranks)

    def _warn(self, text: str) -> None:
        if not self._ranks.rank:
            print(f"warning: {text}", file=sys.stderr, flush=True)
