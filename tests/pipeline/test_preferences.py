"""Policies that learn from preferences directly, as nodes of the real graph."""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SERVED = (
    "reference_logprobs,preference,evaluate_preference,reward_model,rollout,score,policy_update,"
    "evaluate,report"
)
OF_A_RUN = {"reference_logprobs@dpo", "preference@dpo", "evaluate_preference@dpo"}


def planned(clone: Any) -> dict[str, bool]:
    """The stages that the report needs, and whether they are stale."""
    plan = json.loads(clone.run("lockstep", "plan", "--json").stdout)
    return {stage["address"]: stage["stale"] for stage in plan}


def report(clone: Any) -> str:
    """The summary, its lines joined."""
    return " ".join((clone.root / "artifacts/report/summary.md").read_text().split())


def test_a_preference_run_is_a_policy_like_any_other(finished: Any) -> None:
    clone = finished
    clone.without_tracking()
    assert not OF_A_RUN & planned(clone).keys()
    clone.set_params(
        rl__preferences={"dpo": {"policy": "sft"}}, rl__iterations={}, preference__batch_size=16
    )
    assert planned(clone).keys() >= OF_A_RUN
    assert not any(name.endswith("@iter_001") for name in planned(clone))
    with clone.session(SERVED):
        clone.run("lockstep", "run")
        assert "| dpo " in report(clone)
        assert "preferences learnt directly (sigmoid) from SFT to dpo" in report(clone)

        # An iteration may start from it: nothing before it runs again.
        clone.set_params(rl__iterations={"iter_001": {"policy": "dpo"}})
        stale = {address for address, is_stale in planned(clone).items() if is_stale}
        loop = {f"{stage}@iter_001" for stage in ("rollout", "score", "policy_update", "evaluate")}
        assert stale == loop | {"report"}
        clone.run("lockstep", "run")
        assert "(sigmoid), then PPO, 1 iteration from SFT to iter_001" in report(clone)

    # Another beta learns again, from the same reference log-probs.
    clone.set_params(preference__beta=0.3)
    stale = {address for address, is_stale in planned(clone).items() if is_stale}
    assert "preference@dpo" in stale
    assert "reference_logprobs@dpo" not in stale
