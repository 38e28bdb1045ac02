"""How far a mean over responses may be off, where several of them answer the same prompt.

Responses to one prompt resemble one another, so prompts are what is drawn, and many samples of few
prompts do not pass for many prompts. What cannot be known is None: one prompt has no spread.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable


def standard_error(
    values: Iterable[float], prompts: Iterable[Hashable], counts: Iterable[float] | None = None
) -> float | None:
    """Of the mean of the values; with counts, of their sum divided by that of the counts.

    A value is that of one response. Of two policies' differences on the same prompts, it is the
    error of a paired comparison.
    """
    numbers, of_prompt = list(values), list(prompts)
    weights = [1.0] * len(numbers) if counts is None else list(counts)
    sums: dict[Hashable, float] = defaultdict(float)
    sizes: dict[Hashable, float] = defaultdict(float)
    for value, prompt, weight in zip(numbers, of_prompt, weights, strict=True):
        sums[prompt] += value
        sizes[prompt] += weight
    drawn = [prompt for prompt in sums if sizes[prompt] > 0]
    if len(drawn) < 2:
        return None
    total = math.fsum(sizes.values())
    mean = math.fsum(numbers) / total
    spread = math.fsum((sums[prompt] - mean * sizes[prompt]) ** 2 for prompt in drawn)
    return math.sqrt(spread * len(drawn) / (len(drawn) - 1)) / total


def error_name(metric: str) -> str:
    """What the error of a metric is called: `reward_mean_error`, `reward_mean_error/right`."""
    name, slash, source = metric.partition("/")
    return f"{name}_error{slash}{source}"


def error_metric(metric: str, error: float | None) -> dict[str, float]:
    """The error under its name; nothing where it is not known."""
    return {} if error is None else {error_name(metric): error}
