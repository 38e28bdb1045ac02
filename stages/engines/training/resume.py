"""Resuming training: what a checkpoint holds, and which learners it fits.

It holds what is no function of the step: the weights, moments and averages of every learner, and
the metrics of the steps so far. One that does not fit the learners, in names or shapes, or whose
history is not as long as its step, counts as broken.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from stages.checkpoint import (
    Checkpoint,
    drop_checkpoints_after,
    load_checkpoint,
    save_checkpoint,
)
from stages.engines.models.tensor_files import Fetch, Form
from stages.engines.processes.ranks import ALONE, Ranks
from stages.engines.training.learner import AnyLearner

Metrics = dict[str, float]


def save_if_possible(
    scratch: Path,
    learners: Mapping[str, AnyLearner],
    history: list[Metrics],
    more: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> bool:
    """A checkpoint that cannot be written is no reason to stop: the one before it still holds.

    `more` is JSON that whoever resumes gets back beside the history. Says whether it was written.
    All ranks call it.
    """
    values: dict[str, Any] = {**(more or {}), "history": history}
    try:
        save_checkpoint(scratch, len(history), *tensors_of(learners), values, ranks)
    except OSError as error:
        if ranks.rank:
            return False
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


def tensors_of(learners: Mapping[str, AnyLearner], kind: str = "") -> tuple[dict[str, Form], Fetch]:
    """The tensors of all learners as LEARNER/NAME, or those whose names begin with `kind`."""
    forms = {
        f"{learner}/{name.removeprefix(kind)}": form
        for learner in learners
        for name, form in learners[learner].held().items()
        if name.startswith(kind)
    }

    def fetch(name: str, to: int) -> Tensor | None:
        learner, _, rest = name.partition("/")
        return learners[learner].whole(kind + rest, to)

    return forms, fetch


def resume(
    scratch: Path,
    learners: Mapping[str, AnyLearner],
    ranks: Ranks,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    on_node: Path | None = None,
) -> tuple[list[Metrics], Mapping[str, Any]]:
    """Go on from the newest checkpoint that rank 0 finds whole, and whose values fit.

    The history up to there, and all values that were saved with it; none at a fresh start.
    """
    saved = load_checkpoint(
        scratch,
        lambda checkpoint: _fits(checkpoint, learners) and fits(checkpoint.values),
        ranks,
        on_node,
    )
    if not ranks.rank:
        for folder in filter(None, (scratch, on_node)):
            drop_checkpoints_after(folder, saved.step if saved else 0)
    if saved is None:
        return [], {}
    for name, learner in learners.items():
        prefix = f"{name}/"
        learner.load(
            {
                key.removeprefix(prefix): tensor
                for key, tensor in saved.tensors.items()
                if key.startswith(prefix)
            }
        )
    return list(saved.values.get("history", [])), saved.values


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
