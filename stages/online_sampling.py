"""How a step of `online` gets its responses: from the ranks that learn, or from samplers.

Samplers are ranks of the same job with GPUs of their own. They hold the policy and nothing else,
and do what they are told: an order names a step, the weights follow, and the responses go back.
Which weights a step is sampled with is the same in both ways, so its rows are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from stages.context import Context, ShareDone, Stopped
from stages.data.schema import RolloutRow, ToolAnswerRow
from stages.engines.generation.generator import Generator
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.processes.bridge import Bridge
from stages.engines.processes.ranks import ALONE
from stages.engines.processes.step_context import StepContext, bound_to_step
from stages.engines.training.learner import AnyLearner
from stages.engines.training.sampled import (
    Elsewhere,
    Form,
    Outline,
    outline_of,
    sampled_weights,
)

OpenGenerator = Callable[[], AbstractContextManager[Generator]]
RollOut = Callable[
    [OpenGenerator, Context],
    tuple[list[RolloutRow], list[ToolAnswerRow], dict[str, float | int]],
]
"""The responses of a step, by a generator and in the step's context, what their environment
answered, and their metrics."""


@dataclass(frozen=True)
class Sampled:
    """A step's responses."""

    rows: Sequence[RolloutRow]
    answers: Sequence[ToolAnswerRow]
    metrics: Mapping[str, float | int]


class Sampling(Protocol):
    """All ranks that learn have one, and call the same of its methods."""

    def now(self, ctx: StepContext) -> Sampled:
        """A step's responses by the policy as it is."""

    def begin(self, ctx: StepContext) -> None:
        """Have them sampled while the policy moves on; one step at a time."""

    def end(self) -> Sampled:
        """The responses that were begun."""


def sample(roll_out: RollOut, sampler: ResidentSampler, ctx: StepContext) -> Sampled:
    """A step's responses by the weights that the sampler has taken; all ranks that sample."""
    rows, answers, metrics = roll_out(sampler.opened, ctx)
    # Also where all responses were there already.
    sampler.rest()
    policy_hash = sampler.policy_hash()
    return Sampled([{**row, "policy_hash": policy_hash} for row in rows], answers, metrics)


class SampledHere:
    """Every rank that learns samples its share."""

    def __init__(self, roll_out: RollOut, sampler: ResidentSampler, thread: Executor) -> None:
        self._roll_out, self._sampler, self._thread = roll_out, sampler, thread
        self._begun: tuple[StepContext, Future[Sampled | None]] | None = None

    def now(self, ctx: StepContext) -> Sampled:
        self._sampler.take()
        return sample(self._roll_out, self._sampler, ctx)

    def begin(self, ctx: StepContext) -> None:
        """In a thread of its own, by a copy of the policy.

        With several ranks, this one's share: what the ranks do together is the other thread's.
        """
        self._sampler.take()
        future: Future[Sampled | None]
        if (ctx.ranks or ALONE).world == 1:
            future = self._thread.submit(sample, self._roll_out, self._sampler, ctx)
        else:
            future = self._thread.submit(self._fill_share, replace(ctx, ranks=None))
        self._begun = ctx, future

    def _fill_share(self, ctx: StepContext) -> None:
        with suppress(ShareDone):
            self._roll_out(self._sampler.opened, ctx)

    def end(self) -> Sampled:
        assert self._begun is not None
        ctx, future = self._begun
        self._begun = None
        return future.result() or sample(self._roll_out, self._sampler, ctx)


@dataclass(frozen=True)
class Order:
    """A step that samplers are to sample; weights follow, as often as they ask for them."""

    name: str
    folder: Path
    durable: bool
    deaf: bool
    outline: Outline
    """Of the weights."""


@dataclass(frozen=True)
class End:
    """Nothing more is to be sampled."""

    stopped: bool


class SampledApart:
    """Samplers do, while the ranks that learn wait or learn."""

    def __init__(self, bridge: Bridge, learner: AnyLearner) -> None:
        self._bridge, self._learner = bridge, learner
        self._outline: Outline | None = None
        self._begun: StepContext | None = None

    def now(self, ctx: StepContext) -> Sampled:
        self.begin(ctx)
        return self.end()

    def begin(self, ctx: StepContext) -> None:
        outline = self._outline = self._outline or outline_of(self._learner)
        order = Order(str(ctx.key), ctx.folder, ctx.durable, ctx.deaf, outline)
        self._say(order, f"the weights for {ctx.key}")
        self._begun = ctx
        while self._bridge.same(False, source=self._bridge.first_sampler):
            self._bridge.send(outline.forms, sampled_weights(self._learner))

    def end(self) -> Sampled:
        assert self._begun is not None
        name, self._begun = str(self._begun.key), None
        self._bridge.meet(_responses(name))
        sampled: Sampled | None = self._bridge.same(None, source=self._bridge.first_sampler)
        if sampled is None:
            raise Stopped(f"stopped while {name} was sampled")
        return sampled

    def dismiss(self, *, stopped: bool) -> None:
        """Let the samplers go, once they have given what was begun."""
        if self._begun is not None:
            with suppress(Stopped):
                self.end()
        self._say(End(stopped), "the end")

    def _say(self, order: Order | End, at: str) -> None:
        self._bridge.meet(at)
        self._bridge.same(order, source=0)


@contextmanager
def sampled_apart(bridge: Bridge, learner: AnyLearner) -> Iterator[SampledApart]:
    """The samplers of a job, which go when its learners do: at the end, or where all stop.

    Of a failure they learn as all ranks do.
    """
    apart = SampledApart(bridge, learner)
    try:
        yield apart
    except Stopped:
        apart.dismiss(stopped=True)
        raise
    apart.dismiss(stopped=False)


def policy_across(bridge: Bridge) -> Elsewhere:
    """The policy of those that learn, who give its weights as often as samplers ask for them."""

    def receive(forms: Sequence[Form]) -> Iterator[tuple[str, Tensor]]:
        bridge.same(True, source=bridge.first_sampler)
        return bridge.receive(forms)

    return Elsewhere(receive)


def answer_orders(
    bridge: Bridge, policy: Elsewhere, roll_out: RollOut, sampler: ResidentSampler, ctx: Context
) -> None:
    """What a sampler does, to the end; Stopped where the job stops."""
    while True:
        bridge.meet("its next order")
        order: Order | End = bridge.same(End(stopped=False), source=0)
        if isinstance(order, End):
            if order.stopped:
                raise Stopped("the ranks that learn have stopped")
            return
        policy.outline = order.outline
        sampler.take()
        bridge.same(False, source=bridge.first_sampler)
        own = bound_to_step(ctx, order.name, order.folder, durable=order.durable)
        own.deaf = order.deaf
        sampled: Sampled | None = None
        with suppress(Stopped):
            sampled = sample(roll_out, sampler, own)
        bridge.meet(_responses(order.name))
        bridge.same(sampled, source=bridge.first_sampler)


def _responses(name: str) -> str:
    return f"the responses of {name}"
