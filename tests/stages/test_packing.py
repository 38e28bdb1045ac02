"""Which rows go through a model together."""

import itertools
import random

import pytest

from stages.engines.forward.packing import pack


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_one_group_and_no_group_exceeds_the_budget(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(0, 80))]
    groups = pack(lengths, 50)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[row] for row in group) <= 50 or len(group) == 1
    # No two neighbours could have been one.
    for one, two in itertools.pairwise(groups):
        assert sum(lengths[row] for row in one) + lengths[two[0]] > 50


def test_rows_of_like_length_are_together_and_the_longest_are_first():
    assert pack([3, 9, 4, 10, 3], 10) == [[3], [1], [2, 0, 4]]


def test_equal_lengths_keep_their_order():
    assert pack([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
