"""Which pairs are worth a person's time, in an order that depends on the pairs and the seed alone.

    random         any
    close          the rewards of the two differ least: where the reward is least sure
    disagreement   two sources of rewards order the two in opposite ways, by the most

Whatever the order, each prompt gives one pair before any prompt gives a second. A larger number of
pairs begins with the smaller one's.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations

from pipelines.annotations.candidates import REWARD
from pipelines.annotations.pair import Pair
from pipelines.base.errors import LockstepError
from stages.data.seeds import stable_hash

Value = Callable[[Pair], float | None]
"""The smaller, the earlier; None: not at all."""


class Strategy(StrEnum):
    RANDOM = "random"
    CLOSE = "close"
    DISAGREEMENT = "disagreement"


def draw(pairs: Iterable[Pair], strategy: Strategy, seed: int, count: int) -> list[Pair]:
    """The first pairs, each once; LockstepError where the strategy has nothing to go by."""
    different = {pair.id: pair for pair in reversed([*pairs])}
    value = _value(strategy, [*different.values()])
    valued = [(v, pair) for pair in different.values() if (v := value(pair)) is not None]
    if not valued:
        raise LockstepError(_nothing(strategy, bool(different)))
    order = sorted(valued, key=lambda item: (item[0], stable_hash(seed, item[1].id), item[1].id))
    nth: Counter[str] = Counter()
    in_turn = []
    for _, pair in order:
        prompt = str(pair.origin.prompt_id)
        in_turn.append((nth[prompt], pair))
        nth[prompt] += 1
    in_turn.sort(key=lambda item: item[0])
    return [pair for _, pair in in_turn[:count]]


def _nothing(strategy: Strategy, are_pairs: bool) -> str:
    if not are_pairs:
        return "there are no two different whole responses to the same prompt: nothing to compare"
    if strategy is Strategy.CLOSE:
        return "no pair has rewards: `lockstep run` scores the rollouts, or use --strategy random"
    return (
        "no two sources of rewards order a pair in opposite ways; with one source (`score.reward`) "
        "there is nothing to disagree: use --strategy close"
    )


def _value(strategy: Strategy, pairs: Sequence[Pair]) -> Value:
    match strategy:
        case Strategy.RANDOM:
            return lambda _: 0.0
        case Strategy.CLOSE:
            return _distance
        case Strategy.DISAGREEMENT:
            return _disagreement(_spreads(pairs))


def _distance(pair: Pair) -> float | None:
    a, b = pair.one.rewards.get(REWARD), pair.other.rewards.get(REWARD)
    return None if a is None or b is None else abs(a - b)


def _spreads(pairs: Sequence[Pair]) -> dict[str, float]:
    """The standard deviation of each source, over the responses of all pairs."""
    values: dict[str, list[float]] = {}
    for pair in pairs:
        for response in (pair.one, pair.other):
            for source, reward in response.rewards.items():
                values.setdefault(source, []).append(reward)
    spreads = {source: statistics.pstdev(rewards) for source, rewards in values.items()}
    return {source: spread for source, spread in spreads.items() if spread and source != REWARD}


def _disagreement(spreads: Mapping[str, float]) -> Value:
    """How far apart, in standard deviations, two sources that order the pair differently are."""

    def value(pair: Pair) -> float | None:
        gaps = [
            (pair.one.rewards[source] - pair.other.rewards[source]) / spread
            for source, spread in spreads.items()
            if source in pair.one.rewards and source in pair.other.rewards
        ]
        opposite = [abs(a - b) for a, b in combinations(gaps, 2) if a * b < 0]
        return -max(opposite) if opposite else None

    return value
