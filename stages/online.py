"""online: steps of rollout, score and policy update in one job, with everything resident.

A step is an iteration of the staged loop: it calls the functions that rollout, score and
policy_update are made of, on models that stay in memory. On the CPU, K steps of the policy `fast`
end with the bytes of K chained iterations fast_001, fast_002, ..., and have the same rows. So they
do on several ranks: these share the requests, the rows to score and those to learn from, as shards
and ranks of the staged stages do, and the policy may be spread over them.

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
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.context import Context, ShareDone, Stopped
from stages.contracts.online import OnlineConfig, step_name
from stages.data.artifacts import read_role
from stages.data.schema import PromptRow, RolloutRow
from stages.data.tokenizer import Decoder
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.models.loaders import resident
from stages.engines.processes.ranks import ALONE, join
from stages.engines.processes.step_context import StepContext
from stages.engines.training.journal import AHEAD, Journal
from stages.engines.training.learner import AnyLearner
from stages.engines.training.resume import Metrics
from stages.engines.training.rl_state import RlState, load_state
from stages.environments.episodes import Arena, longest_sequence, open_arena
from stages.learning.update import Update
from stages.policy_update import learn, open_learners, save, scored_rollouts
from stages.rewards.isolated import KeptWorkers
from stages.rollout import roll_out
from stages.score import score

SHOWN = ("reward_mean", "kl_to_reference")


def run(
    config: OnlineConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    prompts = read_role(inputs["prompts"], PromptRow, config.rollout.source, "online")
    arena = open_arena(config.rollout, inputs["environments"], inputs["policy"], ctx.seed)
    longest = longest_sequence(prompts, config.rollout.max_new_tokens, arena)
    state = load_state(inputs["state"], config.lora, inputs["policy"])
    with ThreadPoolExecutor(1) as aside, join(ctx) as ranks:
        learners = open_learners(config, inputs, ctx, ranks, state)
        state = replace(state, moments={})  # the learners have them
        with (
            ThreadPoolExecutor(1) as hasher,
            closing(
                ResidentSampler(config, inputs["policy"], learners["policy"], ctx, hasher, longest)
            ) as sampler,
            ThreadPoolExecutor(1) as ahead,
            closing(KeptWorkers()) as workers,
        ):
            steps = Steps(
                config, inputs, ctx, prompts, arena, state, learners, sampler, workers, ahead, aside
            )
            steps.take_all()
        num_steps = steps.optimizer_steps
        ctx.wrote_all(save(config, inputs, out, num_steps, learners, steps.kl_coef, ranks))
    for kind in ("rollouts", "scores", "experience"):
        steps.journal.publish(kind, config.steps, out[kind])
    return {**steps.journal.history[-1], "num_steps": num_steps - state.steps}


@dataclass(frozen=True)
class Sampled:
    """A step's responses."""

    rows: Sequence[RolloutRow]
    metrics: Mapping[str, float | int]


@dataclass(frozen=True)
class Ahead:
    """A step that is being sampled while the one before learns."""

    ctx: StepContext
    sampled: "Future[Sampled | None]"
    """None where other ranks have sampled some of it."""


@dataclass
class Steps:
    """All that is resident, and how far it has come."""

    config: OnlineConfig
    inputs: Mapping[str, Path]
    ctx: Context
    prompts: Sequence[PromptRow]
    arena: Arena | None
    state: RlState
    """Before the first step."""
    learners: Mapping[str, AnyLearner]
    sampler: ResidentSampler
    workers: KeptWorkers
    thread: Executor
    """Samples for the next step."""
    writer: Executor
    """Writes rows."""
    ahead: Sampled | None = None
    """The responses of the next step, where they have been sampled ahead of it."""

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.inputs["policy"])
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
        self.journal.resume()
        self._recall(self.journal.values)
        for step in range(len(self.journal.history) + 1, self.config.steps + 1):
            [asked] = self.ranks.agree(f"step {step}", self.ctx.should_stop())
            self._save(now=asked)
            if asked:
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
        next_one = None
        try:
            sampled = self.ahead or self._sample_now(own)
            clock.lap("generate_seconds")
            if config.online.overlap and step < config.steps:
                next_one = self._sample_ahead(step + 1)
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
            self.journal.write("rollouts", step, sampled.rows)
        self.ahead = self._sampled_ahead(next_one) if next_one else None
        clock.lap("waited_seconds")
        if self.ahead is not None:
            self.journal.write("rollouts", step + 1, self.ahead.rows)
        self.kl_coef = outcome.kl_coef
        self.journal.write("scores", step, scores)
        self.journal.write("experience", step, outcome.experience)
        return {**sampled.metrics, **of_score, **of_update}, clock.seconds

    def _sample_now(self, ctx: StepContext) -> Sampled:
        self.sampler.take()
        return self._sample(ctx)

    def _sample(self, ctx: StepContext) -> Sampled:
        """A step's responses by the weights that the sampler has taken."""
        rows, metrics = self._roll_out(ctx)
        # Also where all responses were there already.
        self.sampler.rest()
        policy_hash = self.sampler.policy_hash()
        return Sampled([{**row, "policy_hash": policy_hash} for row in rows], metrics)

    def _roll_out(self, ctx: Context) -> tuple[list[RolloutRow], dict[str, float | int]]:
        return roll_out(
            self.config, self.prompts, self.decoder, self.sampler.opened, ctx, self.arena
        )

    def _sample_ahead(self, step: int) -> "Ahead":
        """In a thread of its own, by a copy of the policy as it is now.

        With several ranks, this one's share: what the ranks do together is the other thread's.
        """
        ctx = self.journal.begin(step, step_name(str(self.ctx.key), step), AHEAD)
        ctx.deaf = not ctx.durable
        self.sampler.take()
        if self.ranks.world == 1:
            return Ahead(ctx, self.thread.submit(self._sample, ctx))
        return Ahead(ctx, self.thread.submit(self._sample_share, replace(ctx, ranks=None)))

    def _sample_share(self, ctx: StepContext) -> None:
        with suppress(ShareDone):
            self._roll_out(ctx)

    def _sampled_ahead(self, ahead: "Ahead") -> Sampled:
        return ahead.sampled.result() or self._sample(ahead.ctx)

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
            self.ahead = Sampled(rows, ahead["metrics"])


class Clock:
    """How long what took, in the order of its laps."""

    def __init__(self) -> None:
        self.seconds: Metrics = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._at = now - self._at, now
