"""How far two scorings agree: numbers by hand, and against numpy's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.results import agreement


def places(values: list[float], group: int = 2) -> dict:
    return {(f"p{i // group}", i % group): value for i, value in enumerate(values)}


def test_by_hand() -> None:
    one, other = places([0, 1, 2, 3, 1, 1]), places([1, 0, 4, 6, 2, 3])
    said = agreement.compare(one, other)
    assert (said.num_rows, said.num_pairs) == (6, 3)
    assert said.num_reversed == 1, "the first pair"
    assert said.num_tied_in_one == 1, "the last pair"
    assert said.reversed_share == pytest.approx(1 / 3)
    assert said.mean_difference == pytest.approx((1 - 1 + 2 + 3 + 1 + 2) / 6)
    assert agreement.largest(one, other, 2) == [("p1", 1), ("p1", 0)]
    assert agreement.largest(one, one, 2) == []


def test_equal_scorings_agree_and_constant_ones_say_nothing() -> None:
    one = places([0, 1, 2, 5])
    said = agreement.compare(one, one)
    assert (said.pearson, said.spearman) == (pytest.approx(1), pytest.approx(1))
    assert (said.num_reversed, said.num_tied_in_one) == (0, 0)
    said = agreement.compare(one, places([7, 7, 7, 7]))
    assert (said.pearson, said.spearman) == (None, None)
    assert said.num_tied_in_one == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30))
def test_correlations_are_those_of_numpy(pairs) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    found = agreement.correlation(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-12)
    expected = [np.mean([rank for rank, value in enumerate(sorted(a), 1) if value == x]) for x in a]
    assert agreement.ranks(a) == pytest.approx(expected)


def test_the_command_imports_no_torch() -> None:
    program = (
        "import pipelines.results.scores, sys\n"
        "print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
