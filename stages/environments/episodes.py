"""Episodes: a policy and an environment in turns, as completions of whole episodes.

All live episodes of a unit are generated together, each from all that was said and observed so far,
as ids; then their environments are asked side by side (asking.py), and meanwhile another unit is
generated. Those that are over drop out. A sample's random numbers are a hash of its seed and the
turn, so neither its neighbours nor how long they play change what is drawn: the first turn's seed
is the sample's own, and an episode of one turn is the completion that it would be without an
environment.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stages.context import Context, ShareDone, StageError
from stages.contracts.episodes import EpisodeParams, FailedEpisode, LongObservation
from stages.data.finite import sample_name
from stages.data.seeds import stable_hash
from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Completion, Request
from stages.engines.generation.interleaved import Turns
from stages.engines.generation.sampling import Play
from stages.environments.asking import GIVE_UP_S, Asking, Seat
from stages.environments.environment import NoAnswer, Observation
from stages.environments.episode import Episode
from stages.environments.record import NO_RECORD, Record, answers_of
from stages.environments.spoken import Sampled, Spoken
from stages.environments.turns import TurnTemplate, read_turns


class EpisodeLimits(Protocol):
    """The params of an environment and the limits of its episodes: of rollout, and of evaluate."""

    @property
    def environment(self) -> str | None: ...

    @property
    def max_turns(self) -> int: ...

    @property
    def max_observation_tokens(self) -> int: ...


@dataclass(frozen=True)
class Arena:
    """An environment, and the limits of its episodes."""

    limits: EpisodeLimits
    params: EpisodeParams
    turns: TurnTemplate
    decoder: Decoder
    seed: int
    """The run's."""
    asking: Asking


@contextmanager
def open_arena(
    limits: EpisodeLimits,
    params: EpisodeParams,
    folder: Path,
    policy: Path,
    run_seed: int,
    record: Record = NO_RECORD,
) -> Iterator[Arena | None]:
    """The environment that params name, for a policy's folder; None where they name none.

    `folder` is where a user's environments are.
    """
    if limits.environment is None:
        yield None
        return
    record.read()
    decoder = Decoder(policy)
    asked = limits.environment, folder, record, decoder.known_text
    asking = Asking(params, *asked)
    # A stage that stops is given little time, and one that fails has nothing to wait for.
    patience: float | None = GIVE_UP_S
    try:
        markers = params.cut_marker, params.elided_marker
        turns = read_turns(policy, asking.kind.role, asking.kind.stops, *markers)
        if params.long_observation is LongObservation.CUT:
            turns.check_room(limits.max_observation_tokens)
        yield Arena(limits, params, turns, decoder, run_seed, asking)
        patience = None
    except ShareDone:
        patience = None
        raise
    finally:
        asking.close(patience)


def longest_sequence(
    prompts: Sequence[Mapping[str, Any]], max_new_tokens: int, arena: Arena | None
) -> int:
    """Most tokens that one of the prompts has together with a response, or the longest context of
    an episode; StageError where that has no room for a prompt."""
    # Nothing is observed after the last turn.
    observed = (arena.limits.max_turns - 1) * arena.limits.max_observation_tokens if arena else 0
    of_prompt = max(len(row["prompt_ids"]) for row in prompts)
    whole = of_prompt + max_new_tokens + observed
    if not arena or (limit := arena.params.context_tokens) is None:
        return whole
    if of_prompt >= limit:
        raise StageError(
            f"a prompt of {of_prompt} tokens leaves no room for a turn in episodes.context_tokens "
            f"{limit}: raise that, or shorten the prompts"
        )
    return min(whole, limit)


def played(arena: Arena, rows: Sequence[Mapping[str, Any]]) -> Play:
    """What `generate_all` takes, for requests that stand for these rows one by one."""

    def of_unit(unit: range, *requests: Any, **how: Any) -> Turns:
        return play(arena, rows[unit.start : unit.stop], *requests, **how)

    return Play(of_unit, arena.turns.stop_ids, arena.params.concurrency)


def of_episodes(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of completions that are episodes."""
    segments = [
        1 + len(completion.segment_starts)
        for completion in completions
        if completion.segment_starts is not None
    ]
    elision: dict[str, float] = {}
    if segments:
        elided = sum(completion.observations_elided for completion in completions)
        elision = {"segments": statistics.fmean(segments), "observations_elided": elided}
    return {
        "turns": statistics.fmean(completion.turns for completion in completions),
        # Of tools: how many used one.
        "multi_turn_rate": statistics.fmean(completion.turns > 1 for completion in completions),
        "environment_reward": statistics.fmean(
            completion.environment_reward or 0.0 for completion in completions
        ),
        "observations_cut": sum(completion.observations_cut for completion in completions),
        **elision,
    }


def tell_failures(ctx: Context, completions: Sequence[Completion]) -> dict[str, float]:
    """How many episodes there were and how many failed, as metrics; why, as a table."""
    failures = [completion.failure for completion in completions if completion.failure is not None]
    if failures:
        ctx.table("failed_episodes", [{"failure": failure} for failure in failures])
        print(f"{len(failures)} of {len(completions)} episodes failed; the first: {failures[0]}")
    return {"episodes": len(completions), "episodes_failed": len(failures)}


def play(
    arena: Arena,
    rows: Sequence[Mapping[str, Any]],
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    with_support: bool,
) -> Turns:
    """An episode for each row, in their order; `max_new_tokens` is for all turns of one together.

    A row has the columns of a prompt, and names the sample, for messages and the record.
    """
    episodes = [
        Episode(row, request, _seat(arena, row, request))
        for row, request in zip(rows, requests, strict=True)
    ]
    try:
        begun = yield arena.asking.begin([episode.seat for episode in episodes])
        for episode, answer in zip(episodes, begun, strict=True):
            if isinstance(answer, NoAnswer):
                _fail(arena, episode, "the start", answer)
        while live := [episode for episode in episodes if episode.live]:
            completions = yield [
                episode.next_request(max_new_tokens, arena.params) for episode in live
            ]
            turns = [_spoken(*turn) for turn in zip(live, completions, strict=True)]
            acted = [turn for turn in turns if turn is not None]
            answers = yield arena.asking.step(
                [turn.episode.seat for turn in acted],
                [turn.action(arena) for turn in acted],
            )
            for turn, answer in zip(acted, answers, strict=True):
                _hear(arena, turn, answer, max_new_tokens)
            # What they hold others may need.
            arena.asking.leave([episode.seat for episode in live if not episode.live])
    finally:
        arena.asking.leave([episode.seat for episode in episodes])
    elides = arena.params.context_tokens is not None
    return [episode.completion(with_support=with_support, elides=elides) for episode in episodes]


@dataclass(frozen=True)
class _Turn:
    """What the policy has said in an episode, to be answered."""

    episode: Episode
    ids: Sequence[int]

    def action(self, arena: Arena) -> str:
        text, episode = arena.decoder.text(self.ids), self.episode
        if not arena.asking.kind.reads_ids:
            return text
        end = episode.turn_ends[-1] + 1
        place = end - len(self.ids), end
        said = episode.request.prompt_ids, episode.ids, episode.logprobs
        return Spoken.of(text, Sampled(*said, *place, *episode.history.segment))


def _seat(arena: Arena, row: Mapping[str, Any], request: Request) -> Seat:
    given = {name: row.get(name) for name in ("prompt_id", "prompt", "answer")}
    given["extra"] = json.loads(row.get("extra") or "{}")
    if with_ids := arena.asking.kind.reads_ids:
        given["prompt_ids"] = list(request.prompt_ids)
    seed = stable_hash(arena.seed, "environment", row["prompt_id"])
    environment = str(arena.limits.environment)
    answers = answers_of(environment, row, given, seed, with_ids=with_ids)
    return arena.asking.seat(given, seed, answers)


def _spoken(episode: Episode, completion: Completion) -> _Turn | None:
    """None where nobody is to answer: half an action is none."""
    episode.ids += completion.ids
    episode.loss_mask += [1] * len(completion.ids)
    episode.logprobs += completion.logprobs
    episode.support += completion.support or []
    episode.entropy += completion.entropy
    episode.turn_ends.append(len(episode.ids) - 1)
    episode.turn_rewards.append(0.0)
    episode.cut = completion.finish_reason == "length"
    return None if episode.cut or episode.failure else _Turn(episode, completion.ids)


def _hear(arena: Arena, turn: _Turn, answer: Any, max_new_tokens: int) -> None:
    """Go on with what the environment has answered, or a NoAnswer."""
    episode = turn.episode
    try:
        if isinstance(answer, NoAnswer):
            raise answer
        observation: Observation = answer
        episode.turn_rewards[-1] = observation.reward
        episode.reward += observation.reward
        episode.over = observation.done
        spent = sum(episode.loss_mask) >= max_new_tokens
        episode.cut = not observation.done and (spent or episode.turns == arena.limits.max_turns)
        if not episode.live:
            return
        observed = _observed(arena, turn, observation)
    except NoAnswer as problem:
        where = f"step, after the action {turn.action(arena)!r} in turn {episode.turns}"
        _fail(arena, episode, where, problem)
        return
    if not episode.has_room(len(observed), arena.params):
        episode.cut = True
        return
    instead = arena.turns.instead(same_message=turn.ids[-1] in arena.turns.stop_ids)
    episode.observe(observed, instead, max_new_tokens, arena.params)


def _observed(arena: Arena, turn: _Turn, observation: Observation) -> list[int]:
    """The ids of what the policy reads next."""
    same = turn.ids[-1] in arena.turns.stop_ids
    limit = arena.limits.max_observation_tokens
    if observation.ids is None:
        try:
            observed = arena.turns.observed(observation.text, same_message=same)
        except ValueError as error:
            raise NoAnswer(str(error)) from error
    elif len(observed := list(observation.ids)) > limit:
        raise NoAnswer(
            f"its answer is {len(observed)} ids, more than rollout.max_observation_tokens {limit}, "
            "and nobody but the environment knows which of them could be cut: have it say less, or "
            "raise that"
        )
    if len(observed) > limit and arena.params.long_observation is LongObservation.CUT:
        turn.episode.observations_cut += 1
        return arena.turns.shortened(observed, limit, same_message=same)
    if len(observed) > limit:
        raise NoAnswer(
            f"its answer has {len(observed)} tokens, more than rollout.max_observation_tokens "
            f"{limit}: have it say less, raise that, or set episodes.long_observation to cut"
        )
    return observed


def _fail(arena: Arena, episode: Episode, where: str, problem: NoAnswer) -> None:
    name = f"{sample_name(episode.row)} ({episode.row.get('prompt')!r})"
    failure = f"environment {arena.limits.environment} failed at {where}, for {name}: {problem}"
    if arena.params.failed is FailedEpisode.FAIL:
        raise StageError(failure) from problem
    episode.failure, episode.reward = failure, arena.params.failed_reward
