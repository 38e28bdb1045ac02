"""Episodes: a policy and an environment in turns, as completions of whole episodes.

All live episodes of a turn are generated together, each from all that was said and observed so far,
as ids; those that are over drop out. A sample's random numbers are a hash of its seed and the turn,
so neither its neighbours nor how long they play change what is drawn: the first turn's seed is the
sample's own, and an episode of one turn is the completion that it would be without an environment.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from stages.context import StageError
from stages.data.finite import is_finite, sample_name
from stages.data.seeds import stable_hash
from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Completion, Generator, Request, Sampling
from stages.engines.generation.sampling import Play
from stages.environments.environment import Environment, Observation
from stages.environments.loading import find
from stages.environments.turns import TurnTemplate, read_turns


class EpisodeLimits(Protocol):
    """The params of an environment and the limits of its episodes: of rollout, and of evaluate."""

    @property
    def environment(self) -> str | None: ...

    @property
    def max_turns(self) -> int: ...

    @property
    def max_observation_tokens(self) -> int: ...

    @property
    def environment_timeout(self) -> float: ...


@dataclass(frozen=True)
class Arena:
    """An environment, and the limits of its episodes."""

    limits: EpisodeLimits
    environment: Callable[[], Environment]
    turns: TurnTemplate
    decoder: Decoder
    seed: int
    """The run's."""


@dataclass
class _Episode:
    row: Mapping[str, Any]
    request: Request
    environment: Environment
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    entropy: float = 0.0
    reward: float = 0.0
    turns: int = 0
    over: bool = False
    """Whether the environment has said so."""
    cut: bool = False

    @property
    def live(self) -> bool:
        return not self.over and not self.cut

    def next_request(self, max_new_tokens: int) -> Request:
        seed = self.request.seed
        if seed is not None and self.turns:
            seed = stable_hash(seed, "turn", self.turns)
        left = max_new_tokens - sum(self.loss_mask)
        return Request([*self.request.prompt_ids, *self.ids], seed, left)

    def completion(self, *, with_support: bool) -> Completion:
        return Completion(
            ids=self.ids,
            logprobs=self.logprobs,
            entropy=self.entropy,
            finish_reason="stop" if self.over else "length",
            support=self.support if with_support else None,
            loss_mask=self.loss_mask,
            environment_reward=self.reward,
            turns=self.turns,
        )


def open_arena(params: EpisodeLimits, folder: Path, policy: Path, run_seed: int) -> Arena | None:
    """The environment that params name, for a policy's folder; None where they name none.

    `folder` is where a user's environments are.
    """
    if params.environment is None:
        return None
    environment = find(params.environment, folder)
    turns = read_turns(policy, environment.role, environment.stops)
    return Arena(params, environment, turns, Decoder(policy), run_seed)


def longest_sequence(
    prompts: Sequence[Mapping[str, Any]], max_new_tokens: int, arena: Arena | None
) -> int:
    """Most tokens that one of the prompts has together with a response, or an episode."""
    # Nothing is observed after the last turn.
    observed = (arena.limits.max_turns - 1) * arena.limits.max_observation_tokens if arena else 0
    return max(len(row["prompt_ids"]) for row in prompts) + max_new_tokens + observed


def played(arena: Arena, rows: Sequence[Mapping[str, Any]]) -> Play:
    """What `generate_all` takes, for requests that stand for these rows one by one."""

    def of_unit(generator: Generator, unit: range, *requests: Any, **how: Any) -> list[Completion]:
        return play(arena, generator, rows[unit.start : unit.stop], *requests, **how)

    return of_unit


def of_episodes(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of completions that are episodes."""
    return {
        "turns": statistics.fmean(completion.turns for completion in completions),
        "environment_reward": statistics.fmean(
            completion.environment_reward or 0.0 for completion in completions
        ),
    }


def play(
    arena: Arena,
    generator: Generator,
    rows: Sequence[Mapping[str, Any]],
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    sampling: Sampling,
) -> list[Completion]:
    """An episode for each row, in their order; `max_new_tokens` is for all turns of one together.

    A row has the columns of a prompt, and names the sample for messages.
    """
    episodes = [
        _Episode(row, request, _begun(arena, row))
        for row, request in zip(rows, requests, strict=True)
    ]
    stopping = Sampling(**{**vars(sampling), "stop_ids": arena.turns.stop_ids})
    for _ in range(arena.limits.max_turns):
        live = [episode for episode in episodes if episode.live]
        if not live:
            break
        completions = generator.generate(
            [episode.next_request(max_new_tokens) for episode in live],
            max_new_tokens=max_new_tokens,
            sampling=stopping,
        )
        for episode, completion in zip(live, completions, strict=True):
            _take_turn(arena, episode, completion, max_new_tokens)
    return [episode.completion(with_support=sampling.cuts) for episode in episodes]


def _begun(arena: Arena, row: Mapping[str, Any]) -> Environment:
    given = {name: row.get(name) for name in ("prompt_id", "prompt", "answer")}
    given["extra"] = json.loads(row.get("extra") or "{}")
    seed = stable_hash(arena.seed, "environment", row["prompt_id"])
    environment: Environment = _asked(arena, row, "its start", arena.environment)
    _asked(arena, row, "reset", environment.reset, given, seed)
    return environment


def _take_turn(
    arena: Arena, episode: _Episode, completion: Completion, max_new_tokens: int
) -> None:
    episode.ids += completion.ids
    episode.loss_mask += [1] * len(completion.ids)
    episode.logprobs += completion.logprobs
    episode.support += completion.support or []
    episode.entropy += completion.entropy
    episode.turns += 1
    if completion.finish_reason == "length":
        # Half an action is none.
        episode.cut = True
        return
    action = arena.decoder.text(completion.ids)
    where = f"step, after the action {action!r} in turn {episode.turns}"
    answer = _checked(
        arena, episode, where, _asked(arena, episode.row, where, episode.environment.step, action)
    )
    episode.reward += float(answer.reward)
    episode.over = answer.done
    used_up = episode.turns == arena.limits.max_turns or sum(episode.loss_mask) >= max_new_tokens
    if answer.done or used_up:
        episode.cut = not answer.done
        return
    try:
        same = completion.ids[-1] in arena.turns.stop_ids
        observed = arena.turns.observed(answer.text, same_message=same)
    except ValueError as error:
        raise _wrong(arena, episode.row, where, str(error)) from error
    if len(observed) > arena.limits.max_observation_tokens:
        problem = (
            f"its answer has {len(observed)} tokens, more than rollout.max_observation_tokens "
            f"{arena.limits.max_observation_tokens}: have it say less, or raise that"
        )
        raise _wrong(arena, episode.row, where, problem)
    episode.ids += observed
    episode.loss_mask += [0] * len(observed)
    episode.logprobs += [0.0] * len(observed)
    episode.support += [[] for _ in observed if completion.support is not None]


def _checked(arena: Arena, episode: _Episode, where: str, answer: Any) -> Observation:
    if not isinstance(answer, Observation):
        problem = f"it answered with {type(answer).__name__}, not with an Observation"
    elif not isinstance(answer.text, str):
        problem = f"the text of its answer is of type {type(answer.text).__name__}"
    elif not is_finite(answer.reward):
        problem = f"its reward is {answer.reward!r}, not a finite number"
    else:
        return answer
    raise _wrong(arena, episode.row, where, problem)


def _asked(
    arena: Arena, row: Mapping[str, Any], where: str, ask: Callable[..., Any], *arguments: Any
) -> Any:
    """What the environment says, within its time: in a thread that can be left behind."""
    answers: list[Any] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(ask(*arguments))
        except BaseException as error:
            failed.append(error)

    seconds = arena.limits.environment_timeout
    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        problem = f"{type(failed[0]).__name__}: {failed[0]}"
        raise _wrong(arena, row, where, problem) from failed[0]
    if not answers:
        problem = f"no answer within rollout.environment_timeout {seconds:g} seconds"
        raise _wrong(arena, row, where, problem)
    return answers[0]


def _wrong(arena: Arena, row: Mapping[str, Any], where: str, problem: str) -> StageError:
    name = f"{sample_name(row)} ({row.get('prompt')!r})"
    return StageError(
        f"environment {arena.limits.environment} failed at {where}, for {name}: {problem}"
    )
