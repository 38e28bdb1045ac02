"""The training loop that SFT, the reward model and the policy update share.

Always true of it:
- The order of rows depends on (seed, epoch) only.
- A loss is a sum over a micro-batch divided by counts of the whole optimizer step, so gradients and
  metrics do not depend on how the step is split, into micro-batches or over ranks.
- State that matters is a function of the step: killed at any moment and resumed from its
  checkpoint, the loop ends with the bytes of an undisturbed run.
- A number that is not finite stops it.
- Ranks that train together take the same steps; rank 0 alone saves and logs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from stages.context import Context, StageError, Stopped
from stages.data.seeds import shuffled, stable_hash
from stages.engines.optimizer import Learner
from stages.engines.ranks import ALONE, Ranks

Rows = Sequence[int]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Micro:
    """What a micro-batch adds to its optimizer step."""

    loss: Tensor
    """Its share of the step's loss: a sum divided by a count of the whole step."""
    metrics: Mapping[str, Tensor | float]
    """Shares that add up over the step; names ending in _min or _max are reduced so instead."""


@dataclass(frozen=True)
class Plan:
    """Which rows form which optimizer step, and at which learning rate."""

    num_rows: int
    batch_size: int
    epochs: int
    seed: int
    learning_rate: Callable[[int, int], float]
    """(step, number of steps) to a factor on each learner's rate."""

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def rows(self, step: int) -> Rows:
        """The rows of an optimizer step; the last of an epoch may have fewer."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.num_rows, self.seed, epoch)
        return order[index * self.batch_size : (index + 1) * self.batch_size]


@lru_cache(maxsize=1)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    return shuffled(num_rows, seed, "order", epoch)


def train(
    ctx: Context,
    learners: Mapping[str, Learner],
    plan: Plan,
    micro_loss: Callable[[Rows, Rows], Micro],
    *,
    shown: Sequence[str],
    check: Callable[[Metrics], None] = lambda _: None,
    before: str | None = None,
    ranks: Ranks = ALONE,
) -> list[Metrics]:
    """Train to the end of the plan; the metrics of each step.

    `micro_loss(rows, step_rows)` computes one micro-batch of a step; `shown` names the metrics that
    the progress line carries; `check` may refuse a step's metrics by raising. `before` names a
    preliminary run of the loop within a stage: it keeps its checkpoints apart and logs no steps.
    `ranks` are those that were joined, where there are several.
    """
    assert ranks.world == ctx.world, "several ranks have to be joined before they train"
    scratch = ctx.scratch / before if before else ctx.scratch
    scratch.mkdir(exist_ok=True)
    name = f" of {before}" if before else ""
    if ranks.agree_to_stop(ctx.should_stop(), f"the first step{name}"):
        raise Stopped(f"stopped before the first step{name}")
    history = _resume(scratch, learners, ranks)
    if not before:
        ctx.resume_at(len(history))
    saved_at = time.monotonic()
    for learner in learners.values():
        learner.model.train()
    for step in range(len(history), plan.num_steps):
        if ranks.agree_to_stop(ctx.should_stop(), f"step {step + 1}{name}"):
            if not ranks.rank:
                _save(scratch, learners, history)
            raise Stopped(f"stopped after step {step} of {plan.num_steps}")
        metrics = _step(ctx, ranks, learners, plan, step, micro_loss)
        check(metrics)
        history.append(metrics)
        if not before:
            ctx.log(step + 1, metrics)
        ctx.progress(step + 1, plan.num_steps, **{name: metrics[name] for name in shown})
        due = time.monotonic() - saved_at >= ctx.checkpoint_seconds and step + 1 < plan.num_steps
        if due and not ranks.rank:
            _save(scratch, learners, history)
            saved_at = time.monotonic()
    for learner in learners.values():
        learner.model.eval()
    return history


def _step(
    ctx: Context,
    ranks: Ranks,
    learners: Mapping[str, Learner],
    plan: Plan,
    step: int,
    micro_loss: Callable[[Rows, Rows], Micro],
) -> Metrics:
    own = [ranks.rank] if ranks.rank else []
    torch.manual_seed(stable_hash(plan.seed, "dropout", step, *own))
    rows = plan.rows(step)
    share = ranks.share(rows)
    of_share: Metrics = {}
    for start in range(0, len(share), ctx.micro_batch):
        micro = micro_loss(share[start : start + ctx.micro_batch], rows)
        micro.loss.backward()  # type: ignore[no-untyped-call]
        _accumulate(of_share, {"loss": micro.loss.detach(), **micro.metrics})
    metrics: Metrics = {}
    for part in ranks.gather(of_share):
        _accumulate(metrics, part)
    factor = plan.learning_rate(step, plan.num_steps)
    for name, learner in learners.items():
        ranks.sum_gradients(learner.parameters())
        key = "grad_norm" if len(learners) == 1 or name == "policy" else f"{name}_grad_norm"
        metrics[key] = learner.clip_gradients()
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise StageError(
                f"{ctx.stage}: {name} is {value} at step {step + 1} of {plan.num_steps}. Lower the "
                "learning rate, or look at the rows of this step."
            )
    for learner in learners.values():
        learner.step(factor)
    return metrics


def _accumulate(metrics: Metrics, parts: Mapping[str, Tensor | float]) -> None:
    for name, part in parts.items():
        value = float(part)
        if name not in metrics:
            metrics[name] = value
        elif name.endswith("_min"):
            metrics[name] = min(metrics[name], value)
        elif name.endswith("_max"):
            metrics[name] = max(metrics[name], value)
        else:
            metrics[name] += value


def _save(scratch: Path, learners: Mapping[str, Learner], history: list[Metrics]) -> None:
    tensors = {
        f"{name}/{key}": tensor
        for name, learner in learners.items()
        for key, tensor in learner.tensors().items()
    }
    values: dict[str, Any] = {"history": history}
    save_checkpoint(scratch, Checkpoint(len(history), tensors, values))


def _resume(scratch: Path, learners: Mapping[str, Learner], ranks: Ranks) -> list[Metrics]:
    """Go on from the newest checkpoint that rank 0 finds whole; the history up to there."""
    found = None if ranks.rank else load_checkpoint(scratch)
    history: list[Metrics]
    history, tensors = ranks.from_first(
        list(found.values["history"]) if found else [], found.tensors if found else {}
    )
    for name, learner in learners.items() if tensors else ():
        prefix = f"{name}/"
        learner.load_tensors(
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        )
    return history


def warmup_then_cosine(warmup_ratio: float, floor: float = 0.1) -> Callable[[int, int], float]:
    """A linear rise, then half a cosine down to `floor`."""

    def factor(step: int, num_steps: int) -> float:
        warmup = math.ceil(warmup_ratio * num_steps)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, num_steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def warmup_then_constant(steps_before: int, num_warmup: int) -> Callable[[int, int], float]:
    """A linear rise over the first `num_warmup` steps of all, `steps_before` of which are done."""

    def factor(step: int, num_steps: int) -> float:  # noqa: ARG001
        return min(1.0, (steps_before + step + 1) / num_warmup)

    return factor
