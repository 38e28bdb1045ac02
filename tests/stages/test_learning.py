"""What each algorithm makes of rollouts, by hand: advantages, pairs, responses that are kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.algorithms.mismatch import mismatch_weights
from stages.context import Context, StageError
from stages.contracts.catalog import bind
from stages.contracts.lora import LoraParams
from stages.contracts.objectives import Mismatch
from stages.contracts.params import Params
from stages.contracts.policy_update import Critic
from stages.data.seeds import draw_order
from stages.engines.models.folders import content_hash, save_model, start_scalar_model
from stages.engines.processes.ranks import ALONE
from stages.engines.training.rl_state import RlState
from stages.learning.best_of_n import the_best
from stages.learning.critic import load_critic
from stages.learning.experience import Measured, experience_of
from stages.learning.online_pairs import best_and_worst
from stages.learning.unpaired import other_completions
from stages.learning.update import Update
from stages.policy_update import with_variance
from tests.stages.test_lora import write_base

# Two prompts, two responses each, of 2, 1, 2 and 1 tokens.
REWARDS = [1.0, 0.0, 3.0, 1.0]
LENGTHS = [2, 1, 2, 1]
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
# k1 of each token; the coefficient below is 0.5.
LOG_RATIO = torch.tensor([[0.2, -0.4], [0.6, 0.0], [0.0, 1.0], [-0.2, 0.0]])
PAID = [1.0 + 0.1, 0.0 - 0.3, 3.0 - 0.5, 1.0 + 0.1]


def rollout(index: int, **columns: Any) -> dict[str, Any]:
    row = {
        "prompt_id": f"prompt {index // 2}",
        "sample_index": index % 2,
        "reward": REWARDS[index],
        "prompt_ids": [1],
        "response_ids": list(range(10 * index, 10 * index + LENGTHS[index])),
        "finish_reason": "stop",
    }
    return row | columns


ROLLOUTS = [rollout(i) for i in range(4)]


def advantages(algorithm: str, values: Any = None, **settings: Any) -> Any:
    rollout_params = {"greedy_baseline": algorithm == "remax"}
    params = Params.model_validate(
        {"rl": {"algorithm": algorithm}, "policy_update": settings, "rollout": rollout_params}
    )
    config = bind("policy_update@iter_001", params).config
    logprobs = torch.full((4, 2), -1.0)
    mismatch = mismatch_weights(
        logprobs, logprobs, MASK, correction=Mismatch.NONE, cap=2.0, floor=0.0
    )
    measured = Measured(MASK, logprobs, logprobs - LOG_RATIO, mismatch)
    update: Any = SimpleNamespace(
        config=config, rollouts=ROLLOUTS, greedy={"prompt 0": 0.5, "prompt 1": 2.0}
    )
    return experience_of(update, measured, 0.5, values)


GAPS = PAID[0] - PAID[1], PAID[2] - PAID[3]
ROOT_HALF = 0.5**0.5
IN_LOSS = {"kl_in": "loss", "kl_estimator": "k3"}
BY_RESPONSE = {
    "rloo, after the penalties": ("rloo", {}, [GAPS[0], -GAPS[0], GAPS[1], -GAPS[1]]),
    "rloo, with penalties in the loss": ("rloo", IN_LOSS, [1.0, -1.0, 2.0, -2.0]),
    "grpo, by the mean of the group": (
        "grpo",
        {"normalise_by_std": False},
        [GAPS[0] / 2, -GAPS[0] / 2, GAPS[1] / 2, -GAPS[1] / 2],
    ),
    # The deviation of two numbers is their distance over the square root of two.
    "grpo": ("grpo", {}, [ROOT_HALF, -ROOT_HALF, ROOT_HALF, -ROOT_HALF]),
    "remax, by the greedy response": (
        "remax",
        {},
        [PAID[0] - 0.5, PAID[1] - 0.5, PAID[2] - 2.0, PAID[3] - 2.0],
    ),
}


@pytest.mark.parametrize("name", BY_RESPONSE)
def test_a_response_is_compared_with_others(name: str) -> None:
    algorithm, settings, expected = BY_RESPONSE[name]
    found = advantages(algorithm, **settings).advantages
    bound = {"atol": 1e-5, "rtol": 1e-5} if name == "grpo" else {}
    torch.testing.assert_close(found, torch.tensor(expected)[:, None] * MASK, **bound)


def test_reinforce_gives_each_token_what_it_and_those_after_it_are_paid() -> None:
    found = advantages("reinforce", gamma=0.5, whiten_advantages=False).advantages
    # Penalties are half of LOG_RATIO; the reward falls on the last token.
    expected = torch.tensor(
        [[-0.1 + 0.5 * 1.2, 1.2], [-0.3, 0.0], [0.0 + 0.5 * 2.5, 2.5], [1.1, 0.0]]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("algorithm", ["reinforce", "reinforce_pp", "reinforce_pp_baseline"])
def test_whitened_advantages_have_mean_zero_and_spread_one_over_all_tokens(algorithm: str) -> None:
    found = advantages(algorithm).advantages[MASK > 0]
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_the_baseline_of_reinforce_pp_comes_off_the_reward_and_not_off_the_penalties() -> None:
    found = advantages("reinforce_pp_baseline").advantages
    plain = torch.tensor(
        [[0.5 + 0.1, 0.5 + 0.2], [-0.5 - 0.3, 0.0], [1.0 - 0.5, 1.0 - 0.5], [-1.0 + 0.1, 0.0]]
    )
    kept = plain[MASK > 0]
    expected = (plain - kept.mean()) / kept.std(correction=0) * MASK
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_ppo_compares_with_its_critic() -> None:
    values = torch.tensor([[0.5, 0.5], [0.1, 9.0], [1.0, 2.0], [0.0, 9.0]])
    found = advantages("ppo", values, whiten_advantages=False)
    returns = torch.tensor([[1.1, 1.2], [-0.3, 0.0], [2.5, 2.5], [1.1, 0.0]])
    torch.testing.assert_close(found.returns, returns)
    torch.testing.assert_close(found.advantages, (returns - values) * MASK)


def test_the_best_response_is_preferred_to_the_worst() -> None:
    chosen, rejected = best_and_worst(ROLLOUTS)
    assert [row["sample_index"] for row in chosen] == [0, 0]
    assert [row["sample_index"] for row in rejected] == [1, 1]
    flat = [rollout(0), rollout(1, reward=1.0), rollout(2), rollout(3)]
    chosen, _ = best_and_worst(flat)
    assert [row["prompt_id"] for row in chosen] == ["prompt 1"]
    with pytest.raises(StageError, match="no pair to learn from"):
        best_and_worst(flat[:2])


def test_only_responses_that_beat_another_and_ended_are_imitated() -> None:
    assert [row["reward"] for row in the_best(ROLLOUTS, 1)] == [1.0, 3.0]
    assert [row["reward"] for row in the_best(ROLLOUTS, 2)] == [1.0, 3.0]
    three = [rollout(0, sample_index=i, reward=reward) for i, reward in enumerate((1.0, 3.0, 2.0))]
    assert [row["reward"] for row in the_best(three, 1)] == [3.0]
    assert [row["reward"] for row in the_best(three, 5)] == [3.0, 2.0]
    cut = [ROLLOUTS[0], ROLLOUTS[1], rollout(2, finish_reason="length"), ROLLOUTS[3]]
    assert [row["reward"] for row in the_best(cut, 1)] == [1.0]
    with pytest.raises(StageError, match="nothing to keep"):
        the_best([rollout(0, reward=0.0), rollout(1)], 1)


def test_groups_stand_in_for_others_in_the_order_of_drawing() -> None:
    ids = [f"prompt {number}" for number in range(12)]
    rollouts = [
        {"prompt_id": name, "reward": float(sample * (name != "prompt 5"))}
        for name in ids
        for sample in range(2)
    ]
    ctx: Any = SimpleNamespace(seed=3, key="iter_001")
    order = draw_order(ids, 3, "iter_001")
    expected = [name for name in order if name != "prompt 5"][:4]
    kept = {row["prompt_id"] for row in with_variance(rollouts, 4, ctx)}
    assert kept == set(expected)
    assert kept != set(sorted(ids)[:4])


def test_the_other_response_is_that_of_the_next_row_with_another_prompt() -> None:
    rows = [
        {"prompt_id": name, "prompt_ids": [0], "completion_ids": [i]}
        for i, name in enumerate("aabba")
    ]
    assert other_completions(rows) == [[2], [2], [4], [4], [2]]
    with pytest.raises(StageError, match="one prompt only"):
        other_completions(rows[:2])


def test_another_response_is_cut_where_it_would_leave_the_context() -> None:
    rows = [
        {"prompt_id": "long", "prompt_ids": [0] * 6, "completion_ids": [1]},
        {"prompt_id": "short", "prompt_ids": [0], "completion_ids": [2, 3, 4]},
    ]
    assert other_completions(rows) == [[2], [1]]


def test_the_learning_rate_goes_on_from_the_steps_of_earlier_iterations() -> None:
    settings = {"schedule": "linear", "warmup_steps": 2, "decay_steps": 10}
    params = Params.model_validate({"policy_update": {**settings, "batch_size": 2, "epochs": 1}})
    config: Any = bind("policy_update@iter_001", params).config
    ctx: Any = SimpleNamespace(seed=1)

    def rates(steps: int) -> list[float]:
        state = RlState(steps, None, {})
        plan = Update(config, {}, ctx, ALONE, state, {}, ROLLOUTS, {}).plan(len(ROLLOUTS))
        return [plan.learning_rate(step, plan.num_steps) for step in range(plan.num_steps)]

    assert len(rates(0)) == 2
    assert rates(0) == [0.5, 1.0]
    assert rates(2)[0] == 1.0
    assert rates(2)[1] > rates(4)[0] > rates(4)[1] > rates(6)[0]


def test_a_critic_goes_on_from_the_iteration_before(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    first = start_scalar_model(base)
    torch.nn.init.ones_(first.score.weight)
    save_model(first, tmp_path / "state/critic", tokenizer_from=base)
    inputs = {"state": tmp_path / "state", "policy": base, "reward": base}
    ctx = Context("update", "iter_002", seed=1, folder=tmp_path)
    critic = load_critic(inputs, Critic.POLICY, "verifier", LoraParams(), ctx)
    assert content_hash(critic) == content_hash(first)
