"""Policies made by fused steps, as nodes of the real graph."""

import json
from typing import Any

import pytest

from tests.pipeline.conftest import planned, stale

pytestmark = pytest.mark.slow

OF_A_RUN = {"online@fast", "evaluate_online@fast"}


def asked(clone: Any, *words: str) -> Any:
    return json.loads(clone.run("lockstep", "lineage", *words, "--json").stdout)


def test_a_policy_of_fused_steps_is_a_policy_like_any_other(finished: Any) -> None:
    clone = finished
    clone.without_tracking()
    assert not OF_A_RUN & planned(clone).keys()
    clone.set_params(rl__online={"fast": {"policy": "iter_001", "steps": 2}})
    assert stale(clone) == OF_A_RUN | {"report"}
    with clone.session("online,evaluate_online,report"):
        clone.run("dvc", "repro")
    assert not any(planned(clone).values())
    summary = " ".join((clone.root / "artifacts/report/summary.md").read_text().split())
    assert "| fast " in summary
    assert "PPO, 1 iteration and 2 fused steps from SFT to fast" in summary
    lock = (clone.root / "dvc.lock").read_text()
    assert "rl.online.fast.steps: 2" in lock

    made = asked(clone, "policy@fast")
    assert made["target"]["stage"] == "online@fast"
    rows = asked(clone, "policy@fast", "--rows")
    assert {row["step"] for row in rows["rows"]} == {1, 2}
    assert all(row["response"] is not None and row["by_source"] for row in rows["rows"])
    one = rows["rows"][0]["prompt_id"]
    touched = asked(clone, f"prompt:{one}")
    assert "online@fast" in {model["stage"] for model in touched["direct"]}

    # More steps are another policy; another policy beside it is no reason to run it again.
    clone.set_params(rl__online={"fast": {"policy": "iter_001", "steps": 3}})
    assert planned(clone)["online@fast"]
    both = {"fast": {"policy": "iter_001", "steps": 2}, "other": {"policy": "fast", "steps": 1}}
    clone.set_params(rl__online=both)
    assert not planned(clone)["online@fast"]
    assert planned(clone)["online@other"]
