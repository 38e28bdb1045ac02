"""Many requests, decoded unit after unit; shards share the units out.

A unit is a fixed range of requests that are decoded together, more than there are slots where there
are many requests: a slot whose sequence has ended then takes the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stages.context import Context, Stopped
from stages.data.finite import check_finite
from stages.data.seeds import stable_hash
from stages.engines.generation.generator import Completion, Generator, Request, Sampling
from stages.engines.generation.interleaved import Turns, interleaved
from stages.engines.processes.parts import (
    Compute,
    Pass,
    Several,
    collect,
    fill,
    missing,
    pass_names,
)

RESPONSES = "responses-"
"""A pass is named so, with the hash of the weights that sample."""
LEAST_UNITS = 16
"""A unit is one round of the slots until there are so many units, for shards and against kills."""
MOST_ROUNDS = 8
"""A unit has at most so many requests a slot."""


@dataclass(frozen=True)
class Play:
    """Requests are where episodes begin, and completions the whole of them."""

    begin: Callable[..., Turns]
    """(unit, its requests, max_new_tokens=, with_support=) to the episodes of a unit."""
    stop_ids: tuple[int, ...]
    """What ends a turn besides the end tokens."""
    concurrency: int
    """How many episodes may wait for their environments; others are generated meanwhile."""


@dataclass(frozen=True)
class SamplingTask:
    """Requests, and how they are to be answered."""

    requests: Sequence[Request]
    max_new_tokens: int
    sampling: Sampling
    slots: int
    """Sequences that are decoded together."""
    describe: Callable[[int], str]
    """Names a request where its log-probs are not finite."""
    play: Play | None = None

    @property
    def unit_rows(self) -> int:
        rounds = len(self.requests) // (LEAST_UNITS * self.slots)
        return self.slots * min(max(1, rounds), MOST_ROUNDS)

    def decode(self, generator: Generator, unit: range) -> list[dict[str, Any]]:
        """The completions of a unit of the requests."""
        return self._checked(unit, self._answer(generator, self._of(unit)))

    def play_all(
        self, generator: Generator, play: Play, check: Callable[[], None], units: Iterator[range]
    ) -> Iterator[tuple[range, list[dict[str, Any]]]]:
        """The episodes of units, several of which are under way at a time."""

        def begin(unit: range) -> Turns:
            return play.begin(
                unit,
                self._of(unit),
                max_new_tokens=self.max_new_tokens,
                with_support=self.sampling.cuts,
            )

        turn = replace(self, sampling=replace(self.sampling, stop_ids=play.stop_ids))
        answer = partial(turn._answer, generator)
        at_once = 2 + play.concurrency // self.unit_rows
        for unit, completions in interleaved(units, begin, answer, at_once=at_once, check=check):
            yield unit, self._checked(unit, completions)

    def _of(self, unit: range) -> Sequence[Request]:
        return self.requests[unit.start : unit.stop]

    def _answer(self, generator: Generator, requests: Sequence[Request]) -> list[Completion]:
        return generator.generate(
            requests, max_new_tokens=self.max_new_tokens, sampling=self.sampling
        )

    def _checked(self, unit: range, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        for index, completion in zip(unit, completions, strict=True):
            check_finite("the sampler's log-prob", self.describe(index), completion.logprobs)
            check_finite("the entropy of the samples", self.describe(index), completion.entropy)
        return [dict(vars(completion)) for completion in completions]


@dataclass(frozen=True)
class Samples:
    """Completions of all requests, in their order, and the hash of the weights that made them."""

    completions: list[Completion]
    policy_hash: str


def sample_seed(run_seed: int, iteration: str, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample: it depends on what the sample is, not on when it is made."""
    return stable_hash(run_seed, iteration, prompt_id, sample_index)


def generate_all(
    ctx: Context, opened: Callable[[], AbstractContextManager[Generator]], task: SamplingTask
) -> Samples:
    """Complete all requests with the generator that `opened` gives; ShareDone if shards owe some.

    Parts lie under the hash of the weights that sampled them, so those of two policies never mix.
    A process that finds its share done under the one hash there is takes that, and loads no policy.
    """

    def responses(name: str, generator: Generator | None = None) -> Pass:
        def load() -> Compute:
            assert generator is not None
            return partial(task.decode, generator)

        def load_play() -> Several:
            assert generator is not None
            assert task.play is not None
            return partial(task.play_all, generator, task.play, check)

        return Pass(
            name,
            len(task.requests),
            task.unit_rows,
            load,
            _response_length,
            phase="responses",
            ranks_per_unit=ctx.ranks_per_sampler,
            load_several=load_play if task.play else None,
        )

    def check() -> None:
        if ctx.should_stop():
            raise Stopped("stopped between two turns of episodes")

    kept = pass_names(ctx, RESPONSES)
    work = responses(kept[0] if len(kept) == 1 else RESPONSES)
    with _generator(ctx, opened, wanted=bool(missing(ctx, work))) as generator:
        if generator is not None:
            work = responses(RESPONSES + generator.policy_hash, generator)
            fill(ctx, work)
    completions = [Completion(**row) for row in collect(ctx, work)]
    # A rank that had nothing to sample has loaded no policy; rank 0 has whenever there is any.
    name = work.name if ctx.ranks is None else ctx.ranks.same(work.name)
    return Samples(completions, name.removeprefix(RESPONSES))


@contextmanager
def _generator(
    ctx: Context, opened: Callable[[], AbstractContextManager[Generator]], *, wanted: bool
) -> Iterator[Generator | None]:
    """One where this rank wants it.

    What one of several nodes answers with has workers on the others, which their first ranks open,
    too, and have until all answers are there.
    """
    group = ctx.ranks.sampling_group if ctx.ranks is not None else None
    if group is None or group.num_nodes == 1:
        with opened() if wanted else nullcontext() as generator:
            yield generator
        return
    opens = group.agree_to_open(wanted) and group.leads_node
    with opened() if opens else nullcontext() as generator:
        yield generator if wanted else None
        group.meet("the end of their responses")


def _response_length(completions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    num_tokens = sum(Completion(**completion).num_sampled for completion in completions)
    return {"response_length": num_tokens / len(completions)}
