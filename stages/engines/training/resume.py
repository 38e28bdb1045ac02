"""Resuming training: what a checkpoint holds, and which learners it fits.

It holds what is no function of the step: the weights, moments and averages of every learner, and
the metrics of the steps so far. One that does not fit the learners, in names or shapes, or whose
history is not as long as its step, counts as broken.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from stages.checkpoint import (
    Checkpoint,
    drop_checkpoints_after,
    load_checkpoint,
    save_checkpoint,
)
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import AnyLearner

Metrics = dict[str, float]


def gather(learners: Mapping[str, AnyLearner]) -> dict[str, Tensor]:
    """What a checkpoint of the learners holds, on rank 0; all ranks call it."""
    return {
        f"{name}/{key}": tensor
        for name, learner in learners.items()
        for key, tensor in learner.tensors().items()
    }


def save_if_possible(
    scratch: Path,
    tensors: Mapping[str, Tensor],
    history: list[Metrics],
    more: Mapping[str, Any] | None = None,
) -> bool:
    """A checkpoint that cannot be written is no reason to stop: the one before it still holds.

    `more` is JSON that whoever resumes gets back beside the history. Says whether it was written.
    """
    values: dict[str, Any] = {**(more or {}), "history": history}
    try:
        save_checkpoint(scratch, Checkpoint(len(history), tensors, values))
    except OSError as error:
        # The log may be on the same full disk.
        with suppress(OSError):
            print(
                f"warning: no checkpoint of step {len(history)} ({error}): a kill now costs the "
                "work since the one before; make room on the disk that holds .lockstep",
                file=sys.stderr,
                flush=True,
            )
        return False
    return True


def resume(
    scratch: Path,
    learners: Mapping[str, AnyLearner],
    ranks: Ranks,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> tuple[list[Metrics], Mapping[str, Any]]:
    """Go on from the newest checkpoint that rank 0 finds whole, and whose values fit.

    The history up to there, and all values that were saved with it; none at a fresh start.
    """
    saved = None
    if not ranks.rank:
        saved = load_checkpoint(
            scratch, lambda checkpoint: _fits(checkpoint, learners) and fits(checkpoint.values)
        )
        drop_checkpoints_after(scratch, saved.step if saved else 0)
    values: Mapping[str, Any]
    values, tensors = ranks.from_first(
        saved.values if saved else {}, dict(sorted(saved.tensors.items())) if saved else {}
    )
    # One tensor at a time: no rank has to have room for all that the ranks hold together.
    for name, of_learner in groupby(tensors, lambda item: item[0].partition("/")[0]):
        learners[name].load_tensors((key.partition("/")[2], value) for key, value in of_learner)
    return list(values.get("history", [])), values


def _fits(checkpoint: Checkpoint, learners: Mapping[str, AnyLearner]) -> bool:
    """Whether these very learners can go on from it, after as many steps as its history has."""
    history = checkpoint.values.get("history")
    if not isinstance(history, list) or len(history) != checkpoint.step:
        return False
    if not all(isinstance(step, dict) for step in history):
        return False
    left = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    for name, learner in learners.items():
        for key, shape in learner.shapes().items():
            saved_shape = left.pop(f"{name}/{key}", None)
            # A parameter that has not had a gradient yet has no moments.
            if saved_shape != shape and (saved_shape is not None or not key.startswith("moment.")):
                return False
    return not left
