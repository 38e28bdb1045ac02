"""The curves of the Run page: read on where a file grows, and anew where it was written anew."""

import json
from pathlib import Path

import pytest

from pipelines.ui.run_detail import POINTS, Curves, in_order, thinned


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "time": 1.0 + step, "metrics": metrics}) + "\n"


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=3.0) + line(2, loss=2.0))
    return path


def points(curves: Curves, path: Path) -> dict[str, list[tuple[float, float]]]:
    return {curve["name"]: curve["points"] for curve in curves.of(path)}


def test_curves_grow_with_their_file(logged: Path) -> None:
    curves = Curves()
    assert points(curves, logged) == {"loss": [(1, 3.0), (2, 2.0)]}
    with logged.open("a") as file:
        file.write(line(3, loss=1.0, entropy=0.5) + '{"step": 4, "ti')
    assert points(curves, logged) == {"entropy": [(3, 0.5)], "loss": [(1, 3.0), (2, 2.0), (3, 1.0)]}


def test_a_file_that_a_resumed_job_wrote_anew_is_not_drawn_twice(logged: Path) -> None:
    curves = Curves()
    points(curves, logged)
    logged.write_text(line(1, loss=3.0) + line(2, loss=2.5) + line(3, loss=2.0))
    assert points(curves, logged) == {"loss": [(1, 3.0), (2, 2.5), (3, 2.0)]}
    logged.unlink()
    assert points(curves, logged) == {}


def test_what_is_not_finite_is_left_out(logged: Path) -> None:
    with logged.open("a") as file:
        file.write(line(3, loss=float("nan")) + line(4, loss=float("inf")))
    assert points(Curves(), logged) == {"loss": [(1, 3.0), (2, 2.0)]}


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    long = [(float(step), 0.0) for step in range(10 * POINTS + 7)]
    shown = thinned(long)
    assert len(shown) <= POINTS
    assert shown[-1] == long[-1]
    assert shown == sorted(shown)
    assert thinned(long[:POINTS]) == long[:POINTS]


def test_what_is_looked_at_first_comes_first() -> None:
    assert in_order(["grad_norm", "entropy", "reward_mean"]) == [
        "reward_mean",
        "entropy",
        "grad_norm",
    ]
