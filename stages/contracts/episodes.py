"""episodes: how environments are asked, and what becomes of an episode whose environment fails."""

import json
from enum import StrEnum

from pydantic import Field, model_validator

from stages.contracts.base import Section


class FailedEpisode(StrEnum):
    """What becomes of an episode whose environment fails for good."""

    FAIL = "fail"
    """The stage fails, with the environment's error."""
    DROP = "drop"
    """All samples of its prompt are left out and counted; an evaluation ends it."""
    END = "end"
    """It ends where it is, with a reward that is stated."""


class LongObservation(StrEnum):
    """What becomes of an observation that is longer than allowed."""

    FAIL = "fail"
    """The environment has failed; `failed` says what follows."""
    CUT = "cut"
    """Its middle is left out, before the policy sees it."""


class EpisodeParams(Section):
    """Asking environments, which answer side by side."""

    concurrency: int = Field(default=512, ge=1)
    """Largest number of environments that are asked at the same time."""
    processes: int = Field(default=0, ge=0)
    """Processes that environments run in, one answer at a time in each; 0: threads instead."""
    answer_timeout: float = Field(default=60.0, gt=0)
    """Time limit of one answer of an environment, in seconds."""
    timeout: float | None = Field(default=None, gt=0)
    """Time limit of all answers of one episode together, in seconds; null: none."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of one turn; null: what is left of `rollout.max_new_tokens`."""
    retries: int = Field(default=0, ge=0)
    """How often an answer that failed is asked for again, of an environment that is made anew."""
    backoff: float = Field(default=1.0, ge=0)
    """Seconds before the first retry; twice as long before each one after it."""
    failed: FailedEpisode = Field(default=FailedEpisode.FAIL, strict=False)
    """Episodes whose environment fails for good: `fail` the stage, `drop` them, or `end` them."""
    failed_reward: float = 0.0
    """The reward of an episode that is ended so."""
    long_observation: LongObservation = Field(default=LongObservation.FAIL, strict=False)
    """Observations above `rollout.max_observation_tokens`: `fail`, or `cut` out their middle."""
    cut_marker: str = ""
    """Text in place of what was cut out of an observation, such as ` ... `; empty: none."""
    context_tokens: int | None = Field(default=None, ge=2)
    """Largest context, next turn included: above it old observations are elided; null: none is."""
    elide_to: float = Field(default=0.5, gt=0, le=1)
    """Share of `context_tokens` that a context is brought down to, next turn included."""
    elided_marker: str = ""
    """Text in place of an observation that was elided, such as `(left out)`; empty: none."""

    @model_validator(mode="after")
    def _elision_is_on(self) -> "EpisodeParams":
        for name, unset in (("elide_to", 0.5), ("elided_marker", "")):
            value = getattr(self, name)
            if self.context_tokens is None and value != unset:
                raise ValueError(
                    f"{name} {value!r} is not read, since context_tokens is null and nothing is "
                    f"elided: set that, or {name} to {json.dumps(unset)}"
                )
        return self

    @model_validator(mode="after")
    def _a_marker_is_used(self) -> "EpisodeParams":
        if self.cut_marker and self.long_observation is LongObservation.FAIL:
            raise ValueError(
                f"cut_marker {self.cut_marker!r} is not read, since long_observation is fail: set "
                'that to cut, or cut_marker to ""'
            )
        return self
