"""A few steps of SFT on the tiny model, by the loop and the learners that stages train with.

Run by one process, by all ranks, by ranks of which one dies, and by ranks that go on from there:
what each of them ends with is compared here, as numbers and as bytes.
"""

import hashlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.algorithms.loss import Loss
from stages.context import Context
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.precision import Precision
from stages.engines.models.folders import load_policy
from stages.engines.processes.ranks import Ranks
from stages.engines.training.loop import Rows, Step, cosine_plan, fresh_learner, train
from stages.engines.training.resume import tensors_of
from stages.learning.imitation import imitation
from stages.selftest.tiny import make_rows

NUM_STEPS = 6
LOST_AT = 4
"""The step that a rank dies in."""
WEIGHTS = "weights.safetensors"
STEPS = "steps"
"""Where a rank notes when it began each step, in the machine's monotonic seconds."""


def train_tiny(
    ctx: Context, ranks: Ranks, base: Path, num_ranks: int, *, dies: bool = False
) -> dict[str, Any]:
    """Train to the end, from a checkpoint if there is one; all ranks call it.

    `num_ranks` are those that the rows are made for: one process that trains alone has to have the
    rows of all. With `dies`, this rank kills itself in the midst of it.
    """
    params = OptimizerParams(
        learning_rate=1e-3,
        epochs=2,
        batch_size=2 * max(num_ranks, 4),
        # With a smaller one the first steps are the signs of gradients, and rounding flips signs.
        adam_epsilon=1e-3,
    )
    num_rows = params.batch_size * NUM_STEPS // params.epochs
    prompts, completions = make_rows(num_rows)
    model = load_policy(base, ctx.loads_on)
    work = imitation(model, prompts, completions, ctx.device, lambda row: f"row {row}")
    begun: list[float] = []

    def loss(rows: Rows, step: Step) -> Loss:
        begun.append(time.monotonic())
        (ctx.folder / f"{STEPS}-{ctx.rank}").write_text(str(begun[-1]), encoding="utf-8")
        if dies and len(begun) == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return work.loss(rows, step)

    learner = fresh_learner(ctx, ranks, model, params, Precision.FLOAT32)
    plan = cosine_plan(params, num_rows, seed=3)
    counted = replace(work, loss=loss)
    history = train(ctx, {"policy": learner}, plan, counted, shown=["loss"], ranks=ranks)
    forms, fetch = tensors_of({"policy": learner})
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name in sorted(forms)
        if (tensor := fetch(name, 0)) is not None
    }
    if not ctx.rank:
        save_file(tensors, ctx.folder / WEIGHTS)
    return {
        "history": history,
        "digest": digest(tensors) if not ctx.rank else None,
        "resumed_from": len(history) - len(begun),
        "seconds_per_step": (begun[-1] - begun[0]) / max(len(begun) - 1, 1),
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of every weight and moment, by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


def compare(one: Path, many: Path, base: Path) -> dict[str, float]:
    """How far two trained models are apart, beside how far training has moved them.

    Nothing where they have no weights in common to compare.
    """
    ones, others, start = load_file(one / WEIGHTS), load_file(many / WEIGHTS), load_policy(base)
    weights = {name for name in ones if name.startswith("policy/weight.")}
    if not weights or ones.keys() != others.keys():
        return {}
    before = dict(start.named_parameters())
    apart = [float((ones[name] - others[name]).abs().max()) for name in weights]
    moved = [
        float((ones[name] - before[name.removeprefix("policy/weight.")]).abs().max())
        for name in weights
    ]
    return {"weights": max(apart), "moved": max(moved)}
