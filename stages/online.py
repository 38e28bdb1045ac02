"""online: steps of rollout, score and policy update in one job, with everything resident.

A step is an iteration of the staged loop: it calls the functions that rollout, score and
policy_update are made of, on models that stay in memory. On the CPU, K steps of the policy `fast`
end with the bytes of K chained iterations fast_001, fast_002, ..., and have the same rows. So they
do on several ranks: these share the requests, the rows to score and those to learn from, as shards
and ranks of the staged stages do, and the policy may be spread over them. Or some of the ranks
sample and the others learn (online_sampling.py): the rows are the same.

With `online.overlap` a step's responses are sampled while the step before learns, by the policy
that the latter began with: the samples are off-policy by one step, always by the same schedule, so
that no byte depends on who was faster. `policy_update.mismatch` corrects for it.

Sampler and learner have the same weights in memory, so there are no two hashes to compare: that the
sampler did answer with these weights is seen, as everywhere, by its log-probs (`max_logprob_gap`).

In memory are the policy and, as the algorithm needs them, critic, reward model, reference and
teacher; each is loaded when it is first needed. Killed anywhere, the stage goes on from the last
step that was saved (engines/training/journal.py).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stages.context import Context, Stopped
from stages.contracts.online import OnlineConfig, step_name
from stages.contracts.rollout import Engine
from stages.data.artifacts import read_role
from stages.data.schema import PromptRow, RolloutRow, ToolAnswerRow
from stages.data.tokenizer import Decoder
from stages.engines.generation.generators import choose
from stages.engines.generation.resident_sampler import ResidentSampler, refuse_what_vllm_cannot_load
from stages.engines.models.loaders import resident
from stages.engines.processes.ranks import ALONE, Ranks, join
from stages.engines.training.journal import AHEAD, Journal
from stages.engines.training.learner import AnyLearner
from stages.engines.training.resume import Metrics
from stages.engines.training.rl_state import RlState, load_state
from stages.environments.episodes import longest_sequence, open_arena
from stages.environments.record import Record
from stages.learning.update import Update
from stages.online_sampling import (
    OpenGenerator,
    RollOut,
    Sampled,
    SampledHere,
    Sampling,
    answer_orders,
    policy_across,
    sampled_apart,
)
from stages.policy_update import learn, open_learners, save, scored_rollouts
from stages.rewards.isolated import KeptWorkers
from stages.rollout import roll_out
from stages.score import score

SHOWN = ("reward_mean", "kl_to_reference")


def run(
    config: OnlineConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    engine = choose(inputs["policy"], ctx.device, config.rollout.engine)
    prompts = read_role(inputs["prompts"], PromptRow, config.rollout.source, "online")
    decoder = Decoder(inputs["policy"])
    playing = (config.rollout, config.episodes, inputs["environments"], inputs["policy"])
    record = Record(config.rollout.tools, inputs["tool_record"])
    with (
        open_arena(*playing, ctx.seed, record) as arena,
        ThreadPoolExecutor(1) as aside,
        join(ctx) as ranks,
    ):
        longest = longest_sequence(prompts, config.rollout.max_new_tokens, arena)
        opened = partial(open_sampler, config, inputs["policy"], ctx, longest)

        def sample(
            generator: OpenGenerator, ctx: Context
        ) -> tuple[list[RolloutRow], list[ToolAnswerRow], Metrics]:
            return roll_out(config, prompts, decoder, generator, ctx, arena)

        if ctx.only_samples:
            assert ranks.bridge is not None
            policy = policy_across(ranks.bridge)
            with opened(policy.as_learner) as sampler:
                answer_orders(ranks.bridge, policy, sample, sampler, ctx)
        else:
            state = load_state(inputs["state"], config.lora, inputs["policy"])
            learners = open_learners(config, inputs, ctx, ranks, state)
            if engine is Engine.VLLM:
                refuse_what_vllm_cannot_load(learners["policy"].model)
            state = replace(state, moments={})  # the learners have them
            with (
                open_sampling(ranks, learners["policy"], sample, opened) as sampling,
                closing(KeptWorkers()) as workers,
            ):
                steps = Steps(config, inputs, ctx, state, learners, sampling, workers, aside)
                steps.take_all()
            num_steps = steps.optimizer_steps
            ctx.wrote_all(save(config, inputs, out, num_steps, learners, steps.kl_coef, ranks))
    for kind in ("rollouts", "tool_answers", "scores", "experience"):
        steps.journal.publish(kind, config.steps, out[kind])
    return {**steps.journal.history[-1], "num_steps": num_steps - state.steps}


@contextmanager
def open_sampler(
    config: OnlineConfig, policy: Path, ctx: Context, longest: int, learner: AnyLearner
) -> Iterator[ResidentSampler]:
    with (
        ThreadPoolExecutor(1) as hasher,
        closing(ResidentSampler(config, policy, learner, ctx, hasher, longest)) as sampler,
    ):
        yield sampler


@contextmanager
def open_sampling(
    ranks: Ranks,
    learner: AnyLearner,
    sample: RollOut,
    opened: Callable[[AnyLearner], AbstractContextManager[ResidentSampler]],
) -> Iterator[Sampling]:
    """By samplers, where the job has some."""
    if ranks.bridge is not None:
        with sampled_apart(ranks.bridge, learner) as apart:
            yield apart
        return
    with (
        opened(learner) as sampler,
        ThreadPoolExecutor(1) as thread,
        ranks.failing_at_once(),  # whatever the thread still samples
    ):
        yield SampledHere(sample, sampler, thread)


@dataclass
class Steps:
    """All that is resident, and how far it has come."""

    config: OnlineConfig
    inputs: Mapping[str, Path]
    ctx: Context
    state: RlState
    """Before the first step."""
    learners: Mapping[str, AnyLearner]
    sampling: Sampling
    workers: KeptWorkers
    writer: Executor
    """Writes rows."""
    ahead: Sampled | None = None
    """The responses of the next step, where they have been sampled ahead of it."""

    def __post_init__(self) -> None:
        self.journal = Journal(self.ctx, self.learners, self.writer)
        self.kl_coef = self.state.kl_coef
        self.ranks = self.ctx.ranks or ALONE
        self.load = resident(self.ctx)

    @property
    def optimizer_steps(self) -> int:
        """Since RL began."""
        return self.state.steps + sum(int(step["num_steps"]) for step in self.journal.history)

    def take_all(self) -> None:
        """Go on from where the journal is, to the end."""
        with self.journal:
            self._take_all()

    def _take_all(self) -> None:
        self.journal.resume()
        self._recall(self.journal.values)
        for step in range(len(self.journal.history) + 1, self.config.steps + 1):
            [asked] = self.ranks.agree(f"step {step}", self.ctx.should_stop())
            self._save(now=asked)
            if asked:
                self.journal.settle()
                raise Stopped(f"stopped after step {step - 1} of {self.config.steps}")
            started = time.monotonic()
            metrics, seconds = self._take(step)
            took = time.monotonic() - started
            self.journal.end(step, metrics, took)
            rate = metrics["num_tokens"] / max(took, 1e-9)
            self.ctx.log(step, {**metrics, **seconds, "tokens_per_second": rate})
            shown = {name: metrics[name] for name in SHOWN if name in metrics}
            self.ctx.progress(step, self.config.steps, "steps", **shown, seconds=took)
        self.ctx.write_metrics()

    def _take(self, step: int) -> tuple[Metrics, Metrics]:
        """One step; its metrics, and what took how long.

        Rows are written once it has learnt, while the next one is sampled: the thread that writes
        them, and what makes a GPU busy, would take turns.
        """
        config, inputs = self.config, self.inputs
        name = step_name(str(self.ctx.key), step)
        own = self.journal.begin(step, name)
        clock = Clock()
        samples_ahead = config.online.overlap and step < config.steps
        try:
            sampled = self.ahead or self.sampling.now(own)
            clock.lap("generate_seconds")
            if samples_ahead:
                self._begin_ahead(step + 1)
            scores, of_score = score(config, inputs, sampled.rows, own, self.load, self.workers)
            clock.lap("score_seconds")
        except Stopped:
            # No learner has moved yet.
            self._save(now=True)
            raise
        own.deaf = not own.durable
        scored = scored_rollouts(sampled.rows, scores, f"{name}: scores do not fit rollouts")
        state = RlState(self.optimizer_steps, self.kl_coef, {})
        update = Update(
            config, inputs, own, self.ranks, state, self.learners, scored, load=self.load
        )
        outcome, of_update = learn(update)
        clock.lap("update_seconds")
        if sampled is not self.ahead:
            self._write_sampled(step, sampled)
        self.ahead = self.sampling.end() if samples_ahead else None
        clock.lap("waited_seconds")
        if self.ahead is not None:
            self._write_sampled(step + 1, self.ahead)
        self.kl_coef = outcome.kl_coef
        self.journal.write("scores", step, scores)
        self.journal.write("experience", step, outcome.experience)
        return {**sampled.metrics, **of_score, **of_update}, clock.seconds

    def _write_sampled(self, step: int, sampled: Sampled) -> None:
        self.journal.write("rollouts", step, sampled.rows)
        self.journal.write("tool_answers", step, sampled.answers)

    def _begin_ahead(self, step: int) -> None:
        ctx = self.journal.begin(step, step_name(str(self.ctx.key), step), AHEAD)
        ctx.deaf = not ctx.durable
        self.sampling.begin(ctx)

    def _save(self, *, now: bool) -> None:
        ahead = self.ahead and {"metrics": self.ahead.metrics}
        values = {"kl_coef": self.kl_coef, "ahead": ahead}
        self.journal.save(values, self.ahead is not None, now=now)

    def _recall(self, values: Mapping[str, Any]) -> None:
        if not values:
            return
        self.kl_coef = values["kl_coef"]
        if ahead := values["ahead"]:
            rows = self.journal.read_rollouts(len(self.journal.history) + 1)
            # What was answered is written, and nobody learns from it.
            self.ahead = Sampled(rows, (), ahead["metrics"])


class Clock:
    """How long what took, in the order of its laps."""

    def __init__(self) -> None:
        self.seconds: Metrics = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._at = now - self._at, now
