"""The training loop that SFT, the reward model and the policy update share.

Always true of it:
- The order of rows depends on (seed, epoch) only.
- Losses are divided by counts of the whole optimizer step (algorithms/loss.py), so gradients and
  metrics do not depend on how the step is split, into micro-batches or over ranks.
- State that matters is in the checkpoint or is a function of the step (the order of rows, the
  learning rate, every random generator): killed at any moment and resumed, the loop ends with the
  bytes of an undisturbed run.
- A number that is not finite stops it, and the rows that made it so are named.
- Ranks that train together take the same steps; rank 0 alone saves and logs.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, MetricPart, Per
from stages.context import Context, StageError, Stopped
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.precision import Precision
from stages.data.seeds import shuffled, stable_hash
from stages.engines.forward.packed import configure_forward, settings_for
from stages.engines.forward.packing import pack
from stages.engines.processes.ranks import ALONE, Ranks
from stages.engines.training.checkpoints import Checkpoints
from stages.engines.training.faults import explain
from stages.engines.training.learner import AnyLearner, Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.resume import Metrics
from stages.engines.training.schedules import warmup_then_cosine

Rows = Sequence[int]
Number = TypeVar("Number", float, Tensor)
Parts = dict[str, tuple[Number, Per]]


@dataclass(frozen=True)
class Step:
    """What a micro-batch's loss needs of the whole optimizer step."""

    counts: Counts
    """The counts that losses divide by."""
    sums: Mapping[str, float]
    """Sums of the step's survey."""


@dataclass(frozen=True)
class Work:
    """A training task: the counts of its rows, and the loss of some of them."""

    counts: Callable[[Rows], Counts]
    """Valid tokens and sequences of a step's rows."""
    loss: Callable[[Rows, Step], Loss]
    """The loss of a micro-batch: these rows of the step."""
    survey: Callable[[Rows], Mapping[str, float]] | None = None
    """Where the loss depends on numbers of the whole step, these rows' part of their sums; computed
    without gradients before the step's first loss."""
    describe: Callable[[int], str] = lambda row: f"row {row}"
    """A row's name, for people who have to find it in the data."""
    length: Callable[[int], int] = lambda _: 1
    """How many tokens of a row go through the model."""
    check: Callable[[Metrics], None] = lambda _: None
    """May refuse a step's metrics by raising."""
    dropout: bool = False
    """For losses that compare with nothing: where log-probs are held against those of a reference,
    noise in one of them would pass for learning. What it drops depends on how a step is split."""
    parts: Callable[[int], Rows] = lambda row: (row,)
    """What a row is made of, by the numbers that `loss`, `survey`, `describe` and `length` take:
    its parts may go through the model apart, since its loss is the sum of theirs."""


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


def counted(num_tokens: Sequence[int]) -> Callable[[Rows], Counts]:
    """Counts of a step's rows, of which each has so many valid tokens; one without does not count.

    A step without any is divided by one: its loss is 0.
    """

    def counts(rows: Rows) -> Counts:
        some = [num_tokens[i] for i in rows if num_tokens[i]]
        return Counts(max(sum(some), 1), max(len(some), 1))

    return counts


@lru_cache(maxsize=1)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    return shuffled(num_rows, seed, "order", epoch)


def train(
    ctx: Context,
    learners: Mapping[str, AnyLearner],
    plan: Plan,
    work: Work,
    *,
    shown: Sequence[str],
    before: str | None = None,
    ranks: Ranks = ALONE,
) -> list[Metrics]:
    """Train to the end of the plan; the metrics of each step.

    `shown` names the metrics of the progress line. `before` names a preliminary run of the loop
    within a stage: it keeps its checkpoints apart and logs no steps. `ranks` are those that were
    joined, where there are several.
    """
    assert ranks.world == ctx.world, "several ranks have to be joined before they train"
    name = f" of {before}" if before else ""
    if ranks.agree_to_stop(ctx.should_stop(), f"the first step{name}"):
        raise Stopped(f"stopped before the first step{name}")
    with Checkpoints(ctx, learners, ranks, before or "") as checkpoints:
        history, _ = checkpoints.resume()
        if not before:
            ctx.resume_at(len(history), history)
        saved_at, due = time.monotonic(), False
        for learner in learners.values():
            learner.model.train(work.dropout)
            configure_forward(learner.model, settings_for(ctx))
        for step in range(len(history), plan.num_steps):
            stop, save = ranks.agree(f"step {step + 1}{name}", ctx.should_stop(), due)
            if stop or save:
                checkpoints.save(history)
                saved_at = time.monotonic()
            if stop:
                checkpoints.settle()  # while the ranks can still tell each other how it went
                ranks.part()
                raise Stopped(f"stopped after step {step} of {plan.num_steps}")
            started = time.monotonic()
            counts = work.counts(plan.rows(step))
            metrics = _step(ctx, ranks, learners, plan, step, work, counts)
            work.check(metrics)
            history.append(metrics)
            if not before:
                rate = counts.tokens / max(time.monotonic() - started, 1e-9)
                ctx.log(step + 1, {**metrics, "tokens_per_second": rate})
            phase = before.replace("_", " ") if before else "steps"
            ctx.progress(step + 1, plan.num_steps, phase, **{name: metrics[name] for name in shown})
            waited = time.monotonic() - saved_at
            due = not ranks.rank and checkpoints.is_time(waited, ctx.checkpoint_seconds)
    for learner in learners.values():
        learner.settle()
        learner.model.eval()
    ctx.write_metrics()
    return history


def _step(
    ctx: Context,
    ranks: Ranks,
    learners: Mapping[str, AnyLearner],
    plan: Plan,
    step: int,
    work: Work,
    counts: Counts,
) -> Metrics:
    own = [ranks.rank] if ranks.rank else []
    seed = stable_hash(plan.seed, "dropout", step, *own)
    seed_all(seed)
    share = [part for row in ranks.share(plan.rows(step)) for part in work.parts(row)]
    lengths = [work.length(row) for row in share]
    micro_batches: list[Rows] = [
        [share[i] for i in group] for group in pack(lengths, ctx.micro_tokens)
    ]
    empty = _empty_turns(ranks, learners, len(micro_batches)) * [work.parts(plan.rows(step)[0])[:1]]
    of_this_step = Step(counts, _survey(ranks, work, micro_batches, empty))
    on_device: Parts[Tensor] = {}
    with ranks.exchanging():
        for rows in micro_batches:
            loss = work.loss(rows, of_this_step)
            _backward(learners, loss.value / ranks.num_sharing)
            parts = {"loss": MetricPart(loss.value, Per.STEP), **loss.metrics}
            _put_together(
                on_device, {name: (m.share(counts).double(), m.per) for name, m in parts.items()}
            )
        for rows in empty:
            _backward(learners, work.loss(rows, of_this_step).value * 0.0)
    of_share = _read(on_device)
    of_step: Parts[float] = {}
    for of_rank in ranks.gather_shares(of_share):
        _put_together(of_step, of_rank)
    metrics: Metrics = {name: value for name, (value, _) in of_step.items()}
    factor = plan.learning_rate(step, plan.num_steps)
    for name, learner in learners.items():
        learner.sum_gradients(ranks)
        key = "grad_norm" if len(learners) == 1 or name == "policy" else f"{name}_grad_norm"
        metrics[key] = learner.clip_gradients()
    for name, value in metrics.items():
        if not math.isfinite(value):
            why = explain(
                ranks,
                learners,
                share,
                lambda row: work.loss([row], of_this_step),
                (lambda row: work.survey([row])) if work.survey else None,  # type: ignore[misc]
                work.describe,
                seed,
            )
            raise StageError(
                f"{ctx.stage}: {name} is {value} at step {step + 1} of {plan.num_steps}; {why}"
            )
    for learner in learners.values():
        learner.step(factor)
    return metrics


def _empty_turns(ranks: Ranks, learners: Mapping[str, AnyLearner], turns: int) -> int:
    """Turns that this rank goes through for nothing, since another one needs it to take part."""
    if not any(learner.lockstep for learner in learners.values()):
        return 0
    most: int = max(ranks.gather(turns))
    return most - turns


def _backward(learners: Mapping[str, AnyLearner], loss: Tensor) -> None:
    factors = {learner.before_backward() for learner in learners.values()}
    assert len(factors) == 1, "learners that share a loss are of one kind"
    (loss * factors.pop()).backward()  # type: ignore[no-untyped-call]


def seed_all(seed: int) -> None:
    """Every generator that a loss might draw from, on the CPU and on all GPUs."""
    # For each kind of device that is not in use `torch.manual_seed` takes a trace of the stack,
    # which at every step is a twentieth of the training of a small model on the CPU.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def _survey(
    ranks: Ranks, work: Work, micro_batches: Sequence[Rows], empty: Sequence[Rows]
) -> dict[str, float]:
    """The survey's sums over all micro-batches and ranks."""
    if work.survey is None:
        return {}
    sums: dict[str, float] = {}
    with torch.no_grad(), ranks.exchanging():
        parts = [dict(work.survey(rows)) for rows in micro_batches]
        for rows in empty:
            work.survey(rows)
    for of_rank in ranks.gather_shares(parts):
        for part in of_rank:
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _read(parts: Parts[Tensor]) -> Parts[float]:
    """All values at once: each transfer from a GPU waits for all its queued work."""
    if not parts:
        return {}
    values = torch.stack([value for value, _ in parts.values()]).tolist()
    return {
        name: (value, per) for value, (name, (_, per)) in zip(values, parts.items(), strict=True)
    }


def _put_together(metrics: Parts[Number], parts: Parts[Number]) -> None:
    """Add the shares of more rows to a step's metrics, or compare them where they are extremes."""
    for name, (value, per) in parts.items():
        if name not in metrics:
            metrics[name] = (value, per)
            continue
        so_far = metrics[name][0]
        if per is Per.MIN:
            value = _least(so_far, value)
        elif per is Per.MAX:
            value = -_least(-so_far, -value)
        else:
            value = so_far + value
        metrics[name] = (value, per)


def _least(one: Number, two: Number) -> Number:
    return torch.minimum(one, two) if isinstance(one, Tensor) else min(one, two)


def cosine_plan(params: OptimizerParams, num_rows: int, seed: int) -> Plan:
    """The steps of a stage that trains from the start to the end."""
    return Plan(
        num_rows=num_rows,
        batch_size=params.batch_size,
        epochs=params.epochs,
        seed=seed,
        learning_rate=warmup_then_cosine(params.warmup_ratio),
    )


def fresh_learner(
    ctx: Context, ranks: Ranks, model: Any, params: OptimizerParams, precision: Precision
) -> AnyLearner:
    """A learner with a new optimizer."""
    how = Optimization(
        learning_rate=params.learning_rate,
        max_grad_norm=params.max_grad_norm,
        weight_decay=params.weight_decay,
        decay_norms_and_biases=params.decay_norms_and_biases,
        betas=(params.beta1, params.beta2),
        epsilon=params.adam_epsilon,
        ema_decay=params.ema_decay,
        precision=precision,
    )
    return open_learner(ctx, ranks, model, how)


def last_epoch_means(history: Sequence[Metrics], plan: Plan) -> Metrics:
    """Each metric's mean over the steps of the last epoch."""
    steps = history[-plan.steps_per_epoch :]
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[-1]}
