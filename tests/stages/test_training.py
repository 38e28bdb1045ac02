"""The training loop: the split of a step, stopping, resuming, and numbers that are not finite."""

import pytest
import torch

from stages.algorithms.loss import Counts, Loss, MetricPart, Per
from stages.checkpoint import load_checkpoint, save_tensors
from stages.context import StageError, Stopped
from stages.contracts.optimizer import Schedule
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, last_epoch_means, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.schedules import scheduled, warmup_then_cosine
from tests.stages.conftest import Interrupted, everything


def context(folder, **options):
    folder.mkdir(exist_ok=True)
    return Interrupted(stage="test", key=None, seed=3, folder=folder, **options)


DATA = torch.randn(23, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def fit(ctx, model=None, loss_of=None):
    """A linear model with dropout, fitted to a made-up target; its final weights and history."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 1, dtype=torch.float64)
    model = model or torch.nn.Sequential(linear)

    def micro_loss(rows, step):
        x = DATA[list(rows)]
        loss = (model(x).squeeze(-1) - x.sum(1)).square().sum() / step.counts.sequences
        return Loss(loss_of(loss) if loss_of else loss, {"error_max": MetricPart(loss, Per.MAX)})

    plan = Plan(23, 8, 4, seed=5, learning_rate=warmup_then_cosine(0.1))
    learner = Learner(model, Optimization(learning_rate=0.05, max_grad_norm=1.0))
    history = train(
        ctx,
        {"model": learner},
        plan,
        Work(lambda rows: Counts(len(rows), len(rows)), micro_loss),
        shown=["loss"],
    )
    return everything(learner), history


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("micro_tokens", [1, 3, 8])
def test_the_result_does_not_depend_on_the_micro_batch(tmp_path, micro_tokens):
    whole, history = fit(context(tmp_path / "whole", micro_tokens=64))
    split, split_history = fit(context(tmp_path / "split", micro_tokens=micro_tokens))
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], atol=1e-9, rtol=1e-6)
    assert [s["loss"] for s in history] == pytest.approx([s["loss"] for s in split_history])


def test_every_row_is_used_once_an_epoch_in_an_order_that_changes():
    plan = Plan(23, 8, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
    epochs = [[row for step in range(e * 3, e * 3 + 3) for row in plan.rows(step)] for e in (0, 1)]
    assert [sorted(rows) for rows in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]


def test_stopped_and_resumed_training_ends_with_the_same_numbers(tmp_path):
    undisturbed, history = fit(context(tmp_path / "a"))
    for stop in (2, 7):
        ctx = context(tmp_path / "b")
        ctx.stop_after = stop
        with pytest.raises(Stopped):
            fit(ctx)
    resumed, resumed_history = fit(context(tmp_path / "b"))
    assert_same(undisturbed, resumed)
    assert history == resumed_history
    lines = (tmp_path / "b/metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(history)


def test_killed_training_goes_on_from_its_last_checkpoint(tmp_path):
    undisturbed, _ = fit(context(tmp_path / "a"))
    steps = 0

    def die_late(loss):
        nonlocal steps
        steps += 1
        if steps == 9:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        fit(context(tmp_path / "b", checkpoint_seconds=0), loss_of=die_late)
    assert load_checkpoint(tmp_path / "b/scratch").step == 8
    resumed, _ = fit(context(tmp_path / "b"))
    assert_same(undisturbed, resumed)


def test_dropout_repeats_after_a_resume(tmp_path):
    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8, dtype=torch.float64),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1, dtype=torch.float64),
        )

    undisturbed, _ = fit(context(tmp_path / "a"), model())
    ctx = context(tmp_path / "b")
    ctx.stop_after = 5
    with pytest.raises(Stopped):
        fit(ctx, model())
    assert_same(undisturbed, fit(context(tmp_path / "b"), model())[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_with_its_step(tmp_path, bad):
    steps = 0

    def turn_bad(loss):
        nonlocal steps
        steps += 1
        return loss * (bad if steps == 4 else 1)

    with pytest.raises(StageError, match=r"loss is .* at step 4 of 12"):
        fit(context(tmp_path), loss_of=turn_bad)


def test_a_corrupt_checkpoint_is_skipped_for_the_one_before(tmp_path):
    for step in (1, 2, 3):
        save_tensors(tmp_path, step, {"x": torch.tensor([step])}, {"step": step})
    assert load_checkpoint(tmp_path).step == 3
    newest = tmp_path / "checkpoint-00000003/tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.step, int(checkpoint.tensors["x"].whole())) == (2, 2)
    (tmp_path / "checkpoint-00000002/manifest.json").unlink()
    assert load_checkpoint(tmp_path) is None


def test_a_write_that_died_halfway_leaves_the_checkpoint_before(tmp_path):
    save_tensors(tmp_path, 1, {}, {})
    (tmp_path / ".checkpoint-00000002.tmp").mkdir()
    assert load_checkpoint(tmp_path).step == 1
    save_tensors(tmp_path, 2, {}, {})
    assert load_checkpoint(tmp_path).step == 2


def test_a_schedule_goes_on_over_the_iterations():
    rates = {
        kind: scheduled(Schedule(kind), steps_before=before, warmup=4, decay=12, floor=0.1)
        for kind, before in (("constant", 0), ("linear", 6), ("cosine", 6))
    }
    assert [rates["constant"](step, 99) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    # Step 6 of all is a quarter of the way from the end of the warm-up to the end of the decay.
    assert rates["linear"](0, 99) == pytest.approx(0.1 + 0.9 * 0.75)
    assert rates["cosine"](2, 99) == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates["linear"](50, 99) == rates["cosine"](50, 99) == pytest.approx(0.1)


def test_a_stage_reports_the_means_of_its_last_epoch():
    plan = Plan(4, 2, 2, seed=1, learning_rate=warmup_then_cosine(0.0))
    history = [{"loss": loss} for loss in (8.0, 6.0, 3.0, 1.0)]
    assert last_epoch_means(history, plan) == {"loss": 2.0}
