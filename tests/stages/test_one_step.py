"""An update of one step: its own forward pass says what the policy was, and is still checked."""

import pytest

from stages.context import StageError

UPDATE = "policy_update@iter_001"
ONE_STEP = {
    "rl": {"algorithm": "grpo"},
    "policy_update": {
        "batch_size": 64,
        "epochs": 1,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "kl_coef": 0.1,
    },
}


def test_one_step_learns_what_it_learns_after_measuring(go_on, monkeypatch):
    def not_measured(*_):
        raise AssertionError("nothing has to be measured beforehand")

    with monkeypatch.context() as patched:
        patched.setattr("stages.learning.policy_gradient.measure", not_measured)
        _, metrics = go_on("one", [UPDATE], ONE_STEP)
    with monkeypatch.context() as patched:
        patched.setattr("stages.learning.policy_gradient.takes_one_step", lambda *_: False)
        _, measured = go_on("measured", [UPDATE], ONE_STEP)
    assert metrics.keys() == measured.keys()
    for name, value in measured.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_in": "reward"},
        {"batch_size": 9},
        {"mismatch": "token_truncate"},
        {"epochs": 2},
    ],
)
def test_what_needs_the_log_probs_earlier_has_them_measured(go_on, monkeypatch, changes):
    calls = []
    from stages.learning import policy_gradient

    measure = policy_gradient.measure
    monkeypatch.setattr(
        policy_gradient, "measure", lambda *args: (calls.append(1), measure(*args))[1]
    )
    params = {**ONE_STEP, "policy_update": {**ONE_STEP["policy_update"], **changes}}
    go_on("measured", [UPDATE], params)
    assert calls


def test_a_sampler_that_differs_stops_the_update_before_it_is_saved(go_on):
    copy, _ = go_on("copy", [], ONE_STEP)
    copy.rewrite("rollouts/iter_001", lambda row: {"logprobs": [x - 0.2 for x in row["logprobs"]]})
    with pytest.raises(StageError, match=r"log-probs differ by 0\.2"):
        copy.run(UPDATE)
    assert not copy.paths(UPDATE)[1]["model"].exists()
