"""One optimizer step of ragged sequences, laid out in every way that must not matter.

A step is a list of sequences, each with a mask and some numbers a token. A layout puts them into
padded or packed micro-batches on one or two ranks. `outcome` computes a loss there as a trainer
does and maps its gradient back to the sequences, so that two layouts can be compared.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per, Tokens

GARBAGE = (math.nan, math.inf, -math.inf, 1e30, -7.0)
NAMES = (
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "weights",
    "entropies",
    "values",
    "old_values",
    "returns",
)


@dataclass(frozen=True)
class Step:
    """Sequences of one step: a mask and the named numbers of each."""

    masks: list[list[bool]]
    numbers: Mapping[str, list[list[float]]]

    @property
    def counts(self) -> Counts:
        return Counts(
            float(sum(map(sum, self.masks))), float(sum(any(mask) for mask in self.masks))
        )

    def only(self, *names: str) -> "Step":
        """With no more numbers than a loss needs: laying them out takes time."""
        return Step(self.masks, {name: self.numbers[name] for name in names})


@dataclass(frozen=True)
class Batch:
    """A micro-batch: its tensors, and the sequence and position that each entry came from."""

    tensors: Mapping[str, Tensor]
    tokens: Tokens
    origin: list[list[tuple[int, int] | None]]


Layout = list[list[Batch]]
"""The micro-batches of each rank."""
Rows = Sequence[Sequence[int]]
"""The sequences in each row of a micro-batch."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Sequences of 0 to 7 tokens, any of them masked, at least one of them not."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=6))
    if not any(map(any, masks)):
        masks = [*masks, [False, True]]
    seed, spread = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.05, 0.5, 2.0]))
    return random_step(masks, seed, spread)


def random_step(masks: list[list[bool]], seed: int, spread: float) -> Step:
    """`spread` is how far the log-probs of different policies lie apart."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for mask in masks:
        noise = {name: rng.normal(size=len(mask)) for name in NAMES}
        logprobs = -np.abs(2 * noise["logprobs"]) - 0.01
        numbers = {
            "logprobs": logprobs,
            "old_logprobs": logprobs + spread * noise["old_logprobs"],
            "ref_logprobs": logprobs + spread * noise["ref_logprobs"],
            "advantages": noise["advantages"] * (rng.random(len(mask)) > 0.15),
            "weights": np.exp(noise["weights"]),
            "entropies": np.abs(noise["entropies"]),
            "values": noise["values"],
            "old_values": noise["values"] + spread * noise["old_values"],
            "returns": noise["returns"],
        }
        for name in NAMES:
            columns[name].append(numbers[name].tolist())
    return Step(masks, columns)


def lay(
    step: Step,
    rows: Rows,
    *,
    left: bool = False,
    garbage: random.Random | None = None,
    width: int = 0,
) -> Batch:
    """A micro-batch with these sequences in its rows, padded on the right (or the left).

    With `garbage` anything may stand in masked entries. A sequence number past the last is one
    more, whose two tokens are masked.
    """
    masks = [*step.masks, [False, False]]
    local = {sequence: k for k, sequence in enumerate(s for row in rows for s in row)}
    origin: list[list[tuple[int, int] | None]] = []
    for row in rows:
        entries: list[tuple[int, int] | None] = [(s, t) for s in row for t in range(len(masks[s]))]
        origin.append(entries)
    width = max([width, *map(len, origin)])
    for entries in origin:
        padding: list[tuple[int, int] | None] = [None] * (width - len(entries))
        entries[:] = padding + entries if left else entries + padding

    def number(name: str, entry: tuple[int, int] | None) -> float:
        if garbage is not None and not (entry and masks[entry[0]][entry[1]]):
            return garbage.choice(GARBAGE)
        return step.numbers[name][entry[0]][entry[1]] if entry and entry[0] < len(step.masks) else 0

    def table(of_entry: Callable[[tuple[int, int] | None], float], dtype: torch.dtype) -> Tensor:
        cells = [[of_entry(entry) for entry in entries] for entries in origin]
        return torch.tensor(cells, dtype=dtype).reshape(len(rows), width)

    return Batch(
        {
            name: table(lambda entry, n=name: number(n, entry), torch.float64)
            for name in step.numbers
        },
        Tokens(
            table(lambda entry: bool(entry and masks[entry[0]][entry[1]]), torch.bool),
            table(lambda entry: local[entry[0]] if entry else 0, torch.int64),
            len(local),
        ),
        origin,
    )


def layouts(step: Step, rng: random.Random) -> Iterator[tuple[str, Layout]]:
    """The same step in other forms than one right-padded batch."""
    order = list(range(len(step.masks)))
    shuffled = rng.sample(order, len(order))
    extra = [*order, len(order)]

    def alone(sequences: Sequence[int]) -> Rows:
        return [[sequence] for sequence in sequences]

    def pack(sequences: Sequence[int]) -> Rows:
        rows: list[list[int]] = [[]]
        for sequence in sequences:
            if rng.random() < 0.4:
                rows.append([])
            rows[-1].append(sequence)
        return rows

    def split(sequences: Sequence[int], num_parts: int) -> list[Sequence[int]]:
        cuts = sorted(rng.randint(0, len(sequences)) for _ in range(num_parts - 1))
        return [sequences[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequences)], strict=True)]

    yield "left-padded", [[lay(step, alone(order), left=True)]]
    yield "garbage on the right", [[lay(step, alone(order), garbage=rng, width=9)]]
    yield "garbage on the left", [[lay(step, alone(order), garbage=rng, width=9, left=True)]]
    yield "packed", [[lay(step, pack(shuffled))]]
    yield "reordered", [[lay(step, alone(shuffled))]]
    yield "micro-batches", [[lay(step, alone(part)) for part in split(order, 3)]]
    yield "two ranks", [[lay(step, alone(part))] for part in split(shuffled, 2)]
    yield "a masked sequence more", [[lay(step, alone(extra), garbage=rng)]]
    yield (
        "everything at once",
        [
            [lay(step, pack(part), garbage=rng, left=rank == 1) for part in split(sequences, 3)]
            for rank, sequences in enumerate(split(rng.sample(extra, len(extra)), 2))
        ],
    )


@dataclass(frozen=True)
class Outcome:
    """A step's loss, its gradient by sequence and token, and its metrics."""

    value: float
    gradient: list[list[float]]
    metrics: Mapping[str, float]

    def assert_equals(self, other: "Outcome", where: str) -> None:
        assert self.metrics.keys() == other.metrics.keys()
        expected = {**other.metrics, "loss": other.value, **_by_place(other.gradient)}
        actual = {**self.metrics, "loss": self.value, **_by_place(self.gradient)}
        assert actual == pytest.approx(expected, rel=1e-10, abs=1e-10), where


def _by_place(gradient: list[list[float]]) -> dict[str, float]:
    return {f"{s}, {t}": slope for s, row in enumerate(gradient) for t, slope in enumerate(row)}


def outcome(
    step: Step, layout: Layout, loss: Callable[[Batch, Counts], Loss], leaf: str
) -> Outcome:
    """The loss of a step as a trainer computes it: summed over micro-batches, then over ranks.

    The gradient is that of the tensor named `leaf`. Masked entries must have none.
    """
    gradient = [[0.0] * len(mask) for mask in step.masks]
    value, metrics = 0.0, {}
    for batch in (batch for rank in layout for batch in rank):
        variable = batch.tensors[leaf].clone().requires_grad_()
        tensors = {**batch.tensors, leaf: variable}
        result = loss(replace(batch, tensors=tensors), step.counts)
        (slopes,) = torch.autograd.grad(result.value, variable)
        assert not slopes[~batch.tokens.mask].any(), "a masked entry has a gradient"
        value += result.value.item()
        for entries, row in zip(batch.origin, slopes.tolist(), strict=True):
            for entry, slope in zip(entries, row, strict=True):
                if entry and entry[0] < len(gradient):
                    gradient[entry[0]][entry[1]] += slope
        for name, metric in result.metrics.items():
            share = float(metric.share(step.counts))
            if name not in metrics:
                metrics[name] = share
            elif metric.per in (Per.MIN, Per.MAX):
                metrics[name] = (min if metric.per is Per.MIN else max)(metrics[name], share)
            else:
                metrics[name] += share
    return Outcome(value, gradient, metrics)


def plain(step: Step) -> Layout:
    """One right-padded batch on one rank."""
    return [[lay(step, [[sequence] for sequence in range(len(step.masks))])]]
