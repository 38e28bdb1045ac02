"""What the steps of one process leave in the stage's scratch: their rows, and the learners.

The rows of each step are files, written as the step ends. The learners are written at most every
`checkpoint_seconds`, at the end of a step, together with the hashes of all files so far; who goes
on finds both as they were, or goes on from the checkpoint before. A step that will take longer than
that begins with a checkpoint, so that what it leaves inside can be gone on from, too. A checkpoint
that could not be written counts as none, and is tried again when as much time has passed.
"""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.checkpoint import file_hash, sync_path
from stages.context import Context
from stages.data.artifacts import FILE_MODE, read_parquet, write_parquet
from stages.data.schema import ExperienceRow, RolloutRow, ScoreRow, ToolAnswerRow, columns_of
from stages.engines.processes.ranks import ALONE
from stages.engines.processes.step_context import StepContext, step_context
from stages.engines.training.checkpoints import Checkpoints
from stages.engines.training.learner import AnyLearner
from stages.engines.training.resume import Metrics

KINDS = {
    "rollouts": RolloutRow,
    "tool_answers": ToolAnswerRow,
    "scores": ScoreRow,
    "experience": ExperienceRow,
}
AHEAD = "-ahead"
"""The part of a step that is done while the step before learns."""
STEP = pa.field("step", pa.int32(), nullable=False)
"""The column that the rows of all steps together begin with."""


class Journal:
    """All ranks have one, and call the same of its methods; rank 0's writes the rows."""

    def __init__(self, ctx: Context, learners: Mapping[str, AnyLearner], writer: Executor) -> None:
        self._ctx, self._learners, self._writer = ctx, learners, writer
        self._ranks = ctx.ranks or ALONE
        self._checkpoints = Checkpoints(ctx, learners, self._ranks)
        self._rows, self._steps = ctx.scratch / "rows", ctx.scratch / "steps"
        self._files: dict[str, str] = {}
        self._unsynced: set[str] = set()
        self._writing: list[Future[tuple[str, str]]] = []
        self.history: list[Metrics] = []
        self.values: Mapping[str, Any] = {}
        """What the checkpoint that was gone on from said beside the history."""
        self._saved_step, self._tried_at = 0, time.monotonic()
        self._last_step_s = math.inf

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpoints.__exit__(*error)

    def resume(self) -> None:
        """Put the learners to where they were; what is of later steps goes."""
        self.history, self.values = self._checkpoints.resume(self._are_there)
        self._files = dict(self.values.get("files", {}))
        self._saved_step = len(self.history)
        self._ctx.resume_at(len(self.history), self.history)
        begun = {self._folder(self._saved_step + 1), self._folder(self._saved_step + 2, AHEAD)}
        if not self._ctx.rank:
            for folder in set(self._steps.glob("*")) - begun:
                shutil.rmtree(folder)

    def begin(self, step: int, name: str, part: str = "") -> StepContext:
        """The context of a step; durable where the state that there is now has been saved."""
        folder = self._folder(step, part)
        return step_context(self._ctx, name, folder, durable=self._is_saved())

    def write(self, kind: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows of a step; they are written while others compute."""
        if self._ctx.rank:
            return
        path = self._path(kind, step)
        name = path.relative_to(self._rows).as_posix()

        def written() -> tuple[str, str]:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(".tmp")
            write_parquet(aside, rows, KINDS[kind])
            digest = file_hash(aside)
            os.replace(aside, path)
            return name, digest

        self._writing.append(self._writer.submit(written))

    def read_rollouts(self, step: int) -> list[RolloutRow]:
        return read_parquet(self._path("rollouts", step), RolloutRow)

    def end(self, step: int, metrics: Metrics, seconds: float) -> None:
        """A step is over: its folder goes."""
        self.history.append(metrics)
        self._last_step_s = seconds
        for part in ("", AHEAD) if not self._ctx.rank else ():
            shutil.rmtree(self._folder(step, part), ignore_errors=True)

    def save(self, values: Mapping[str, Any], is_ahead: bool, *, now: bool) -> None:
        """Keep the learners as they are at the end of a step, `now` or where it is time to.

        `is_ahead`: the rollouts of the next step are there, too.
        """
        waited = time.monotonic() - self._tried_at
        due = self._checkpoints.is_time(waited + self._last_step_s, self._ctx.checkpoint_seconds)
        if self._is_saved() or not self._ranks.same(now or due):
            return
        self._settle(sync=True)
        last = len(self.history) + is_ahead
        files = {name: digest for name, digest in self._files.items() if _step(name) <= last}
        kept = {**values, "files": files}
        if self._checkpoints.save(self.history, kept):
            self._saved_step = len(self.history)
        # Also where it failed: a try costs as much, and a disk is hardly ever full for one step.
        self._tried_at = time.monotonic()

    def settle(self) -> None:
        """Wait until the last checkpoint counts; all ranks do."""
        self._checkpoints.settle()

    def publish(self, kind: str, num_steps: int, path: Path) -> None:
        """The rows of all steps as one file, one row group per step."""
        self._settle(sync=False)
        columns = columns_of(KINDS[kind], pq.read_schema(self._path(kind, 1)).names)
        whole = pa.schema([STEP, *columns])
        with pq.ParquetWriter(path, whole, compression="zstd", store_schema=False) as writer:
            for step in range(1, num_steps + 1):
                table = pq.read_table(self._path(kind, step), schema=columns)
                steps = pa.array([step] * len(table), STEP.type)
                writer.write_table(table.add_column(0, STEP, steps).cast(whole))
        path.chmod(FILE_MODE)

    def _settle(self, *, sync: bool) -> None:
        """Wait until all rows so far are written."""
        for future in self._writing:
            name, digest = future.result()
            self._files[name] = digest
            self._unsynced.add(name)
        self._writing.clear()
        if sync:
            for name in self._unsynced:
                sync_path(self._rows / name)
            self._unsynced.clear()

    def _is_saved(self) -> bool:
        return self._saved_step == len(self.history)

    def _folder(self, step: int, part: str = "") -> Path:
        return self._steps / f"{step:06d}{part}"

    def _path(self, kind: str, step: int) -> Path:
        return self._rows / kind / f"{step:06d}.parquet"

    def _are_there(self, values: Mapping[str, Any]) -> bool:
        """Whether the files of the steps are those that the checkpoint was written beside."""
        files = values.get("files")
        if not isinstance(files, dict):
            return False
        return all(
            (self._rows / name).is_file() and file_hash(self._rows / name) == digest
            for name, digest in files.items()
        )


def _step(name: str) -> int:
    return int(Path(name).stem)
