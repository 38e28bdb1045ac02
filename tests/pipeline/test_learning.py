"""The claims of the demo, by its own numbers on held-out prompts: both algorithms learn."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CRITIC_NAMES = {"value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm"}


def evaluations(clone: Any) -> dict[str, dict[str, float]]:
    folder = clone.root / "metrics/evaluations"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def assert_learnt(clone: Any) -> None:
    policies = evaluations(clone)
    before, after = policies["sft"], policies["iter_003"]
    assert after["accuracy"] >= before["accuracy"] + 0.15
    assert after["accuracy_sampled"] > before["accuracy_sampled"]
    assert before["kl_to_reference"] == pytest.approx(0, abs=1e-6)
    assert 0 < after["kl_to_reference"] < 1
    assert after["entropy"] > 0.25 * before["entropy"]
    assert after["truncation_rate"] < 0.05


def test_ppo_with_the_reward_model_and_grpo_with_the_verifier_learn(clone: Any) -> None:
    clone.run("lockstep", "run")
    reward_model = json.loads((clone.root / "metrics/reward_model.json").read_text())
    assert reward_model["pairwise_accuracy"] >= 0.85
    assert_learnt(clone)
    update = clone.root / "metrics/iterations/iter_003/policy_update.json"
    ppo_names = set(json.loads(update.read_text()))
    supervised = evaluations(clone)["sft"]["accuracy"]

    clone.run("lockstep", "preset", "grpo")
    clone.set_params(rl__reward="verifier")
    clone.run("lockstep", "run")
    assert evaluations(clone)["sft"]["accuracy"] == supervised
    assert_learnt(clone)
    assert set(json.loads(update.read_text())) == (ppo_names - CRITIC_NAMES) | {"kl_loss"}
    state = clone.root / "artifacts/policies/iter_003/state"
    assert not (state / "critic").exists()
