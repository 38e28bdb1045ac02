"""Policies that learn from preferences directly, as nodes of the real graph."""

from typing import Any

import pytest

from tests.pipeline.conftest import planned, stale

pytestmark = pytest.mark.slow

SERVED = (
    "reference_logprobs,preference,evaluate_preference,reward_model,rollout,score,policy_update,"
    "evaluate,report"
)
OF_A_RUN = {"reference_logprobs@dpo", "preference@dpo", "evaluate_preference@dpo"}


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
        loop = {f"{stage}@iter_001" for stage in ("rollout", "score", "policy_update", "evaluate")}
        assert stale(clone) == loop | {"report"}
        clone.run("lockstep", "run")
        assert "(sigmoid), then PPO, 1 iteration from SFT to iter_001" in report(clone)

    # Another beta learns again, from the same reference log-probs.
    clone.set_params(preference__beta=0.3)
    plan = planned(clone)
    assert (plan["preference@dpo"], plan["reference_logprobs@dpo"]) == (True, False)
