"""The protocol of a generator (an inference engine), its requests and its completions.

Log-probs and entropies are those of the distribution that the token was drawn from: scaled by the
temperature and, where unlikely tokens are cut off, renormalised over the rest, the *support*. A
completion carries its supports, so that a trainer can compute the very same log-probs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stages.context import Context, StageError
from stages.contracts.precision import Precision

if TYPE_CHECKING:
    # torch comes with it, and what makes no tokens itself needs none.
    from stages.engines.processes.sampling_group import SamplingGroup


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and what else ends a completion; the defaults cut nothing off.

    As in vLLM, logits are first divided by the temperature, then cut: by min_p, then top_k, then
    top_p, each on what the ones before have left, renormalised. Of equally likely tokens the one
    with the lower id ranks first, so that a support depends on nothing but the distribution (vLLM
    keeps all that are as likely as the k-th).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Nucleus sampling: the likeliest tokens up to this total probability; 1: off."""
    top_k: int = 0
    """Top-k sampling; 0: off."""
    min_p: float = 0.0
    """Min-p sampling: smallest probability relative to the likeliest token; 0: off."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the model's own end tokens; they are its last id."""

    @property
    def cuts(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Request:
    """A prompt, and the seed of the sample; without a seed the likeliest token is taken."""

    prompt_ids: Sequence[int]
    seed: int | None = None
    max_new_tokens: int | None = None
    """Limit of new tokens, where it is below that of the call."""

    def limit(self, of_call: int) -> int:
        """Largest number of new tokens, in a call that allows so many."""
        return of_call if self.max_new_tokens is None else min(self.max_new_tokens, of_call)


FinishReason = Literal["stop", "length", "failed"]
"""How a response ended: by an end, at a limit, or with an environment that failed."""


@dataclass(frozen=True)
class Completion:
    """A sampled response; one that ended has an end token, or one that stops, as its last id.

    Where an environment was played with (stages/environments), it is a whole episode: all turns,
    and what was observed between them.
    """

    ids: list[int]
    logprobs: list[float]
    entropy: float
    """Sum over the tokens, in nats."""
    finish_reason: FinishReason
    support: list[list[int]] | None = None
    """The ids, sorted, that each token was drawn from; None: the whole vocabulary."""
    loss_mask: list[int] | None = None
    """0 for each token that was observed, not sampled: its log-prob is 0 and its support empty;
    None: all were sampled."""
    environment_reward: float | None = None
    """The environment's reward of the episode."""
    turns: int = 1
    turn_ends: list[int] | None = None
    """Where in `ids` the last token of each turn is; None without an environment."""
    turn_rewards: list[float] | None = None
    """What the environment paid for each turn."""
    observations_cut: int = 0
    """Observations that were too long and have been cut."""
    observations_elided: int = 0
    """Observations that the policy no longer read at the end."""
    segment_starts: list[int] | None = None
    """Where in `ids` contexts became shorter; None where none may (environments/elision.py)."""
    segment_histories: list[list[int]] | None = None
    """What the policy read there, after the prompt and in place of all ids before."""
    failure: str | None = None
    """What was wrong with the environment, where the episode failed."""
    answers: list[dict[str, Any]] | None = None
    """What the environment was asked and answered (environments/record.py)."""

    @property
    def num_sampled(self) -> int:
        return len(self.ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True)
class GeneratorSettings:
    """Where a generator computes, in which precision, and how much it takes on at a time."""

    device: str
    precision: Precision
    slots: int
    """Sequences that are decoded together."""
    tensor_parallel: int = 1
    """GPUs that vLLM spreads the model over."""
    memory_share: float = 0.9
    """The share of their memory that vLLM takes; torch takes what it needs of one."""
    longest: int | None = None
    """Tokens that a request has at most together with its answer. vLLM starts only if its cache has
    room for such a sequence; where it is not known, for the model's whole context."""
    group: "SamplingGroup | None" = None
    """The ranks whose GPUs these are, where they are not all of one process."""

    @classmethod
    def of_job(
        cls, ctx: Context, precision: Precision, slots: int, longest: int
    ) -> "GeneratorSettings":
        """On what the job has."""
        return cls(
            ctx.device,
            precision,
            slots,
            ctx.tensor_parallel,
            ctx.generator_memory,
            longest,
            ctx.ranks.sampling_group if ctx.ranks is not None else None,
        )


class Generator(Protocol):
    """An inference engine: it samples from a policy."""

    policy_hash: str
    """Of the weights that it answers with."""

    def load(self, folder: Path) -> None:
        """Load the weights in a folder; StageError if they did not arrive."""

    def generate(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling
    ) -> list[Completion]:
        """Complete all requests, in their order."""

    def sleep(self) -> None:
        """Free the device's memory: weights and cache."""

    def wake(self) -> None:
        """Load the weights from before the sleep again."""

    def close(self) -> None:
        """Free everything."""


def check_context(context: int | None, requests: Sequence[Request], max_new_tokens: int) -> None:
    """StageError where a prompt and its answer do not fit the model's context."""
    if not all(len(request.prompt_ids) for request in requests):
        raise StageError("a prompt has no tokens: what is to be answered has to begin somehow")
    longest = max(requests, key=lambda each: len(each.prompt_ids) + each.limit(max_new_tokens))
    num_prompt, limit = len(longest.prompt_ids), longest.limit(max_new_tokens)
    if context is not None and num_prompt + limit > context:
        raise StageError(
            f"a prompt of {num_prompt} tokens and rollout.max_new_tokens {limit} do not fit "
            f"the model's context of {context}: lower rollout.max_new_tokens or shorten the prompts"
        )
