"""Optimizer steps that are the same step, laid out and split in different ways.

A step has units: a unit is a tuple of sequences (a pair has two, a single response one), and a
sequence a number of tokens. Its data are fields by token, [N, ...], in the order of units. A split
deals the units to ranks and micro-batches in any order, and a layout places the sequences of a
micro-batch in a tensor: padded on either side, with holes, or packed, and with anything at all in
the entries that do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per, Tokens

Lengths = list[tuple[int, ...]]
"""The number of tokens of each sequence of each unit."""


@dataclass(frozen=True)
class Layout:
    """How the sequences of a micro-batch become one tensor."""

    style: str = "right"
    garbage: float = 0.0
    extra: int = 0

    def positions(self, lengths: Sequence[int]) -> tuple[list[list[tuple[int, int]]], int, int]:
        """(row, column) of each token of each sequence, and the numbers of rows and columns."""
        if self.style == "packed":
            capacity = max([*lengths, 4]) + self.extra
            row, column, places = 0, 0, []
            for length in lengths:
                if column + length > capacity:
                    row, column = row + 1, 0
                places.append([(row, column + i) for i in range(length)])
                column += length + self.extra
            return places, row + 1, capacity
        stride = 2 if self.style == "holes" else 1
        width = max([*lengths, 1]) * stride + self.extra
        places = []
        for row, length in enumerate(lengths):
            start = width - length if self.style == "left" else 0
            places.append([(row, start + stride * i) for i in range(length)])
        return places, len(lengths), width


@dataclass(frozen=True)
class MicroBatch:
    """Some units of a step, laid out."""

    units: list[int]
    layout: Layout
    lengths: Lengths

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(unit, which of its sequences), all first ones before all second ones."""
        return [(unit, side) for side in range(len(self.lengths[0])) for unit in self.units]

    @property
    def tokens(self) -> Tokens:
        lengths = [self.lengths[unit][side] for unit, side in self.sequences]
        places, rows, columns = self.layout.positions(lengths)
        mask = torch.zeros(rows, columns, dtype=torch.bool)
        sequence = torch.zeros(rows, columns, dtype=torch.long)
        if self.layout.style != "packed":
            sequence += torch.arange(rows)[:, None]
        for number, place in enumerate(places):
            for at in place:
                mask[at], sequence[at] = True, number
        return Tokens(mask, sequence, len(lengths))

    def lay(self, field: Tensor) -> Tensor:
        """A field by token of the whole step, as a tensor over this micro-batch's tokens."""
        flat = [length for unit in self.lengths for length in unit]
        starts = [0, *accumulate(flat)]
        lengths = [self.lengths[unit][side] for unit, side in self.sequences]
        places, rows, columns = self.layout.positions(lengths)
        sides = len(self.lengths[0])
        source, target = [], []
        for (unit, side), place in zip(self.sequences, places, strict=True):
            start = starts[unit * sides + side]
            source += range(start, start + len(place))
            target += [row * columns + column for row, column in place]
        shape = (rows * columns, *field.shape[1:])
        if field.dtype == torch.bool:
            laid = torch.zeros(shape, dtype=torch.bool)
        else:
            laid = torch.full(shape, self.layout.garbage, dtype=field.dtype)
        laid = laid.index_put((torch.tensor(target, dtype=torch.long),), field[source])
        return laid.view(rows, columns, *field.shape[1:])


Split = list[list[MicroBatch]]
"""The micro-batches of each rank."""


@dataclass(frozen=True)
class Outcome:
    """What a step amounts to, whatever its split."""

    value: Tensor
    gradient: Tensor
    metrics: Mapping[str, Tensor]


def whole(lengths: Lengths, units: Sequence[int] | None = None) -> Split:
    """One micro-batch on one rank, plainly padded, of all units or of these."""
    units = range(len(lengths)) if units is None else units
    return [[MicroBatch(list(units), Layout(), lengths)]]


Share = Callable[[MicroBatch, Tensor], Loss]
"""A micro-batch's share of a step's loss, given a field that is laid out in it."""


def outcome(split: Split, field: Tensor, counts: Counts, share: Share) -> Outcome:
    """Add up the shares of a step and the gradient of `field`, which nothing masked may reach."""
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(field)
    metrics: dict[str, Tensor] = {}
    for batch in (batch for rank in split for batch in rank):
        leaf = field.clone().requires_grad_()
        laid = batch.lay(leaf)
        laid.retain_grad()
        loss = share(batch, laid)
        loss.value.backward()
        assert not laid.grad[~batch.tokens.mask].any(), "a gradient into a masked entry"
        value = value + loss.value.detach()
        gradient += leaf.grad
        for name, metric in loss.metrics.items():
            add = {Per.MIN: torch.minimum, Per.MAX: torch.maximum}.get(metric.per, torch.add)
            part = metric.share(counts)
            metrics[name] = add(metrics[name], part) if name in metrics else part
    return Outcome(value, gradient, metrics)


def in_any_layout(
    data: st.DataObject,
    lengths: Lengths,
    field: Tensor,
    share: Share,
    *,
    counts: Counts | None = None,
    layouts: st.SearchStrategy["Layout"] | None = None,
) -> Outcome:
    """What a step amounts to plainly padded, and in another split, which has to be the same."""
    counts = counts or counts_of(lengths)
    plain = outcome(whole(lengths, valid_units(lengths)), field, counts, share)
    split = data.draw(splits(lengths, layouts or LAYOUTS))
    assert_same(plain, outcome(split, field, counts, share))
    return plain


def assert_by_the_formula(
    ours: Outcome, formula: Callable[[Tensor], dict[str, float]], field: Tensor
) -> None:
    """`formula` gives the loss and the metrics; its slopes are the gradient."""
    theirs = formula(field)
    assert float(ours.value) == pytest.approx(theirs.pop("loss"), abs=1e-12)
    shares = {name: float(share) for name, share in ours.metrics.items()}
    assert shares == pytest.approx(theirs, abs=1e-12)
    expected = slopes(lambda at: formula(at)["loss"], field)
    torch.testing.assert_close(ours.gradient, expected, atol=1e-8, rtol=1e-8)


def assert_same(a: Outcome, b: Outcome) -> None:
    near = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(a.value, b.value, **near)
    torch.testing.assert_close(a.gradient, b.gradient, **near)
    assert a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
        torch.testing.assert_close(a.metrics[name], b.metrics[name], **near)


LAYOUTS = st.builds(
    Layout,
    style=st.sampled_from(["right", "left", "holes", "packed"]),
    garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    extra=st.integers(0, 2),
)


@st.composite
def splits(
    draw: st.DrawFn, lengths: Lengths, layouts: st.SearchStrategy[Layout] = LAYOUTS
) -> Split:
    """The units in any order, dealt to micro-batches of any sizes on one or two ranks."""
    order = draw(st.permutations(range(len(lengths))))
    ranks: Split = [[] for _ in range(draw(st.integers(1, 2)))]
    while order:
        size = draw(st.integers(1, len(order)))
        batch = MicroBatch(list(order[:size]), draw(layouts), lengths)
        draw(st.sampled_from(ranks)).append(batch)
        order = order[size:]
    return ranks


def unit_lengths(sides: int) -> st.SearchStrategy[Lengths]:
    """Units with sequences of 0 to 4 tokens, at least one of them without an empty sequence."""
    unit = st.tuples(*[st.integers(0, 4)] * sides)
    return st.lists(unit, min_size=1, max_size=6).filter(lambda units: any(map(all, units)))


def valid_units(lengths: Lengths) -> list[int]:
    """The units that count: those of which every sequence has a token."""
    return [number for number, unit in enumerate(lengths) if all(unit)]


def counts_of(lengths: Lengths) -> Counts:
    """All tokens, and the units that count."""
    return Counts(num_tokens(lengths), len(valid_units(lengths)))


def num_tokens(lengths: Lengths) -> int:
    return sum(map(sum, lengths))


def random_field(num: int, seed: int, *trailing: int) -> Tensor:
    """[num, ...] numbers of the size of log-probs, none positive."""
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(num, *trailing, generator=generator, dtype=torch.float64)


def slopes(function: Callable[[Tensor], float], at: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of a function by central differences."""
    gradient = torch.zeros_like(at)
    for index in range(at.numel()):
        ahead, behind = at.clone().view(-1), at.clone().view(-1)
        ahead[index] += step
        behind[index] -= step
        difference = function(ahead.view_as(at)) - function(behind.view_as(at))
        gradient.view(-1)[index] = difference / (2 * step)
    return gradient
