"""One episode: what was said and observed so far, and what it becomes at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.contracts.episodes import EpisodeParams
from stages.data.schema import as_kept
from stages.data.seeds import stable_hash
from stages.engines.generation.generator import Completion, FinishReason, Request
from stages.environments.asking import Seat
from stages.environments.elision import History, Observed


@dataclass
class Episode:
    """Ids of the policy and of observations, one after another, and what is known of each."""

    row: Mapping[str, Any]
    request: Request
    seat: Seat
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    entropy: float = 0.0
    reward: float = 0.0
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    observations_cut: int = 0
    history: History = field(default_factory=History)
    over: bool = False
    """Whether the environment has said so."""
    cut: bool = False
    failure: str | None = None
    """Why its environment gave no answer, for good."""

    @property
    def turns(self) -> int:
        return len(self.turn_ends)

    @property
    def live(self) -> bool:
        """Whether the policy is to speak: at least once, also where its environment failed."""
        return not (self.over or self.cut or (self.failure and self.turns))

    @property
    def finish_reason(self) -> FinishReason:
        if self.failure:
            return "failed"
        return "stop" if self.over else "length"

    def longest_turn(self, max_new_tokens: int, params: EpisodeParams) -> int:
        """Tokens that its next turn has at most, where the context has room."""
        left = max_new_tokens - sum(self.loss_mask)
        return left if params.turn_tokens is None else min(left, params.turn_tokens)

    def next_request(self, max_new_tokens: int, params: EpisodeParams) -> Request:
        seed = self.request.seed
        if seed is not None and self.turns:
            seed = stable_hash(seed, "turn", self.turns)
        context = [*self.request.prompt_ids, *self.history.read(self.ids)]
        limit = self.longest_turn(max_new_tokens, params)
        if params.context_tokens is not None:
            limit = min(limit, params.context_tokens - len(context))
        return Request(context, seed, limit)

    def has_room(self, num_observed: int, params: EpisodeParams) -> bool:
        """Whether the policy can read so many tokens more, and say one, if all older are elided."""
        if params.context_tokens is None:
            return True
        num_whole = len(self.request.prompt_ids) + len(self.ids) + num_observed
        return num_whole - self.history.saved() < params.context_tokens

    def observe(
        self,
        observed: Sequence[int],
        instead: Sequence[int],
        max_new_tokens: int,
        params: EpisodeParams,
    ) -> None:
        """What the policy reads next; `instead` is read once it is elided."""
        start = len(self.ids)
        self.ids += observed
        self.loss_mask += [0] * len(observed)
        self.logprobs += [0.0] * len(observed)
        self.support += [[] for _ in observed]
        self.history.observations.append(Observed(start, len(self.ids), instead))
        num_whole = len(self.request.prompt_ids) + len(self.ids)
        num_whole += self.longest_turn(max_new_tokens, params)
        self.history.shorten(self.ids, num_whole, params)

    def completion(self, *, with_support: bool, elides: bool) -> Completion:
        # The reward of a failed episode stands for all that was paid before.
        of_turns = [0.0] * (self.turns - 1) + [self.reward] if self.failure else self.turn_rewards
        # As precise as on disk: fused steps learn from them without having read them back.
        reward, *of_turns = as_kept([self.reward, *of_turns])
        return Completion(
            ids=self.ids,
            logprobs=self.logprobs,
            entropy=self.entropy,
            finish_reason=self.finish_reason,
            support=self.support if with_support else None,
            loss_mask=self.loss_mask,
            environment_reward=reward,
            turns=self.turns,
            turn_ends=self.turn_ends,
            turn_rewards=of_turns,
            observations_cut=self.observations_cut,
            observations_elided=self.history.num_unread,
            segment_starts=self.history.starts if elides else None,
            segment_histories=self.history.histories if elides else None,
            failure=self.failure,
            answers=self.seat.answers.rows,
        )
