"""Episodes of some rows, without a stage around them."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.engines.generation.generator import Completion, Generator, Request, Sampling
from stages.engines.generation.sampling import SamplingTask
from stages.environments.episodes import Arena, played


def play_all(
    arena: Arena,
    generator: Generator,
    rows: Sequence[Mapping[str, Any]],
    requests: Sequence[Request],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[Completion]:
    """One unit of episodes, one for each row."""
    play = played(arena, rows)
    task = SamplingTask(requests, max_new_tokens, sampling, len(rows), str, play)
    [(_, episodes)] = task.play_all(generator, play, lambda: None, iter([range(len(rows))]))
    return [Completion(**episode) for episode in episodes]
