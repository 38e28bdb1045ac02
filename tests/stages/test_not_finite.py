"""A number that is not finite stops a stage, and the message finds the row that has it."""

import shutil

import pytest
import torch

from stages.algorithms.loss import Counts, Loss
from stages.context import Context, StageError
from stages.contracts.catalog import bind
from stages.engines.models.folders import load_policy
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.schedules import warmup_then_cosine
from stages.learning.experience import measure
from stages.rewards.verifier import Verifier
from tests.stages.conftest import rewrite_weights

ROLLOUT, SCORE, UPDATE = "rollout@iter_001", "score@iter_001", "policy_update@iter_001"
PLAN = Plan(23, 8, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
HUGE = 3e38
NAN, INF = float("nan"), float("inf")


def fit(folder, loss_of, *, learning_rate=0.05, survey=None):
    """Steps of 8 rows over one weight; `loss_of` a row's number, the weight and the step's sums."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def loss(rows, step):
        losses = [loss_of(row, model.weight[0, 0], step.sums) for row in rows]
        return Loss(torch.stack(losses).sum() / step.counts.sequences)

    counts = lambda rows: Counts(len(rows), len(rows))  # noqa: E731
    work = Work(counts, loss, survey, lambda row: f"pupil {row}")
    ctx = Context(stage="test", key=None, seed=3, folder=folder, micro_tokens=3)
    learner = Learner(model, Optimization(learning_rate=learning_rate, max_grad_norm=1.0))
    return train(ctx, {"model": learner}, PLAN, work, shown=["loss"])


def step_of(row):
    return next(step + 1 for step in range(PLAN.num_steps) if row in PLAN.rows(step))


@pytest.mark.parametrize("row", [7, 20])
def test_the_row_whose_loss_is_not_a_number_is_named(tmp_path, row):
    expected = rf"loss is nan at step {step_of(row)} of 6; look at pupil {row} \(its loss alone is"
    with pytest.raises(StageError, match=expected) as caught:
        fit(tmp_path, lambda index, weight, _: weight.square() * (NAN if index == row else 1.0))
    assert str(caught.value).count("pupil") == 1


def test_the_row_whose_gradient_is_not_finite_is_named(tmp_path):
    expected = rf"grad_norm is (nan|inf) at step {step_of(7)} .*pupil 7 \(the gradient of weight"
    with pytest.raises(StageError, match=expected):
        # The root of 0 is 0, and its slope is infinite.
        fit(tmp_path, lambda i, weight, _: (weight * 0).sqrt() if i == 7 else weight.square())


def test_rows_that_are_too_large_only_together_are_said_to_be(tmp_path):
    with pytest.raises(StageError, match=r"step 1 of 6; each of its rows alone is finite"):
        fit(tmp_path, lambda _, weight, __: weight * HUGE)


def test_weights_that_left_the_numbers_are_named(tmp_path):
    with pytest.raises(StageError, match=r"step 2 of 6; its weights are not finite already, first"):
        fit(tmp_path, lambda _, weight, __: weight.square(), learning_rate=INF)


def test_the_row_that_spoils_a_number_of_the_whole_step_is_named(tmp_path):
    expected = rf"at step {step_of(7)} of 6; look at pupil 7 \(its ratio alone is inf"
    with pytest.raises(StageError, match=expected):
        fit(
            tmp_path,
            lambda _, weight, sums: weight.square() * (0.0 * sums["ratio"] + 1.0),
            survey=lambda rows: {"ratio": sum(INF if row == 7 else 1.0 for row in rows)},
        )


@pytest.fixture
def run(copied):
    """A factory of copies of the trained run."""

    def copy(**changes):
        made = copied(rl={"preferences": {"tuned": {"policy": "sft"}}}, **changes)
        shutil.rmtree(made.root / "jobs")
        return made

    return copy


def blow_up(folder, name):
    """Weights that are numbers themselves, of a model that does not say numbers."""
    rewrite_weights(folder / "model.safetensors", lambda tensors: tensors[name].fill_(HUGE))


def first_sample(runner):
    row = runner.rows("rollouts/iter_001")[0]
    return f"prompt {row['prompt_id']}, sample {row['sample_index']}"


def test_log_probs_are_refused_where_they_are_made(run):
    runner = run()
    sample = first_sample(runner)
    blow_up(runner.root / "artifacts/policies/sft/model", "lm_head.weight")
    said = r"log-prob is nan at token 0 of the response, for"
    for address, whose in ((ROLLOUT, "sampler"), (SCORE, "reference")):
        with pytest.raises(StageError, match=f"the {whose}'s {said} {sample}"):
            runner.run(address)
    prompt = runner.rows("data/preferences")[0]["prompt_id"]
    with pytest.raises(StageError, match=rf"{said} chosen 0 \(prompt {prompt}"):
        runner.run("reference_logprobs@tuned")


def test_the_trainers_log_probs_are_checked_before_it_learns(run):
    runner = run()
    policy = load_policy(runner.root / "artifacts/policies/sft/model")
    policy.lm_head.weight.data.fill_(HUGE)
    rollouts = runner.rows("rollouts/iter_001")
    config = bind(UPDATE, runner.params).config
    with pytest.raises(StageError, match=rf"trainer's log-prob is nan .*{first_sample(runner)}"):
        measure(runner.context(UPDATE), policy, rollouts, config)


def test_a_reward_that_is_not_finite_names_its_source_and_sample(run):
    runner = run()
    blow_up(runner.root / "artifacts/rewards/reward_model", "score.weight")
    expected = rf"the reward from reward_model is (nan|-?inf) for {first_sample(runner)}"
    with pytest.raises(StageError, match=expected):
        runner.run(SCORE)


@pytest.mark.parametrize(
    ("said", "expected"),
    [(NAN, "the reward from verifier is nan"), (1e300, "the reward to learn from is inf")],
)
def test_a_reward_that_its_column_cannot_hold_is_refused(run, monkeypatch, said, expected):
    # The verifier says 0 or 1; what users write may say anything.
    monkeypatch.setattr(Verifier, "reward", lambda *_, **__: said)
    runner = run(score={"weights": {"verifier": 1.0}})
    with pytest.raises(StageError, match=f"{expected} for {first_sample(runner)}"):
        runner.run(SCORE)


@pytest.mark.parametrize(
    ("stage", "row"), [("sft", "demonstration"), ("reward_model", "preference")]
)
def test_a_row_of_the_data_is_named_by_its_place(run, stage, row):
    runner = run()
    blow_up(runner.root / "artifacts/base", "model.norm.weight")
    with pytest.raises(StageError, match=rf"is (nan|-?inf).* {row} \d+ \(prompt \w+\)"):
        runner.run(stage)
