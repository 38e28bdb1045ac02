"""Killed anywhere, on any disk, a stage goes on to the very same bytes, with one row a step."""

import errno
import json
import random
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file

from stages import checkpoint
from stages.algorithms.loss import Counts, Loss
from stages.checkpoint import load_checkpoint, save_tensors
from stages.context import Context, Stopped
from stages.engines.forward import inference
from stages.engines.training import journal
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.schedules import warmup_then_cosine
from tests.stages.conftest import everything
from tests.stages.test_algorithms import by

NUM_STEPS = 12
UPDATE = "policy_update@iter_001"


class Told(Context):
    """Does something after each step."""

    after = None

    def log(self, step, metrics):
        super().log(step, metrics)
        if self.after:
            self.after(self, step)


def context(folder, after=None):
    folder.mkdir(exist_ok=True)
    ctx = Told(stage="test", key=None, seed=3, folder=folder, checkpoint_seconds=0)
    ctx.after = after
    return ctx


def fit(ctx, width=4, drawn=None, ema_decay=0.0):
    """Weights that follow noise from all generators; what training leaves."""
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1, dtype=torch.float64)

    def loss(rows, step):
        noise = torch.randn(width, dtype=torch.float64)
        noise += torch.tensor(numpy.random.standard_normal(width))
        noise += random.random()
        if drawn is not None:
            drawn.append(noise.tolist())
        return Loss((model.weight[0] - noise).square().sum() * len(rows) / step.counts.sequences)

    plan = Plan(23, 8, 4, seed=5, learning_rate=warmup_then_cosine(0.1))
    how = Optimization(learning_rate=0.05, max_grad_norm=1.0, ema_decay=ema_decay)
    learner = Learner(model, how)
    work = Work(lambda rows: Counts(len(rows), len(rows)), loss)
    history = train(ctx, {"model": learner}, plan, work, shown=["loss"])
    return everything(learner), history


def die(_, step):
    if step == 7:
        raise KeyboardInterrupt


def killed(folder, **options):
    """A folder of a training that died after its seventh step, with checkpoints of 5 and 6."""
    with pytest.raises(KeyboardInterrupt):
        fit(context(folder, die), **options)
    return folder


def assert_same(one, two):
    (weights, history), (others, other_history) = one, two
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert history == other_history


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_generator_is_where_it_would_have_been(tmp_path):
    """Torch's, numpy's and Python's own; each kind of noise is in every step's loss."""
    drawn = []
    undisturbed = fit(context(tmp_path / "a"), drawn=drawn)
    assert len({tuple(noise) for noise in drawn}) == NUM_STEPS
    killed(tmp_path / "b")
    for generator in (torch.manual_seed, numpy.random.seed, random.seed):
        generator(99)
    assert_same(undisturbed, fit(context(tmp_path / "b")))


def test_a_moving_average_goes_on_where_it_was(tmp_path):
    undisturbed = fit(context(tmp_path / "a"), ema_decay=0.8)
    killed(tmp_path / "b", ema_decay=0.8)
    assert_same(undisturbed, fit(context(tmp_path / "b"), ema_decay=0.8))


def test_what_is_left_is_the_moving_average(tmp_path):
    passed = []

    def look(ctx, step):
        newest = load_checkpoint(ctx.scratch)
        if newest and newest.step == step - 1:
            passed.append(newest.tensors["model/weight.weight"].whole().clone())

    torch.manual_seed(0)
    average = torch.nn.Linear(4, 1, dtype=torch.float64).weight.detach()
    left, _ = fit(context(tmp_path / "a", look), ema_decay=0.8)
    assert len(passed) == NUM_STEPS - 1
    for weights in passed:
        average = 0.8 * average + 0.2 * weights
    plain, _ = fit(context(tmp_path / "b"))
    average = 0.8 * average + 0.2 * plain["weight.weight"]
    assert torch.allclose(left["weight.weight"], average, rtol=1e-12)
    assert not torch.equal(left["weight.weight"], plain["weight.weight"])


def test_a_checkpoint_without_the_average_does_not_fit_who_has_one(tmp_path):
    killed(tmp_path / "a")
    undisturbed = fit(context(tmp_path / "b"), ema_decay=0.8)
    assert_same(undisturbed, fit(context(tmp_path / "a"), ema_decay=0.8))


LOSSES = {
    "nothing": lambda lines: lines,
    "all": lambda _: [],
    "the middle": lambda lines: lines[:2] + lines[5:],
    "half a line at the end": lambda lines: [*lines[:4], lines[4][:20]],
    "half a line in between": lambda lines: [*lines[:2], lines[2][:9] + lines[3], *lines[4:]],
    "a row twice": lambda lines: [*lines, lines[1]],
}


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_have_one_row_a_step_whatever_the_file_lost(tmp_path, name):
    _, history = fit(context(tmp_path / "a"))
    folder = killed(tmp_path / "b")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 7
    path.write_text("".join(LOSSES[name](lines)))
    fit(context(folder))
    rows = logged(folder)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row, expected in zip(rows, history, strict=True):
        assert {key: row["metrics"][key] for key in expected} == expected
        assert row["time"] > 0
    kept = [row for row in rows[:6] if "tokens_per_second" in row["metrics"]]
    assert len(kept) == {"nothing": 6, "a row twice": 6, "all": 0}.get(name, len(kept))


def test_a_deleted_metrics_file_is_written_back_too(tmp_path):
    folder = killed(tmp_path)
    (folder / "metrics.jsonl").unlink()
    fit(context(folder))
    assert [row["step"] for row in logged(folder)] == list(range(1, NUM_STEPS + 1))


def newest(folder):
    return max((folder / "scratch").glob("checkpoint-*"))


def tear(folder):
    path = newest(folder) / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(folder):
    path = newest(folder) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def change_a_digit(folder):
    """Of the history, which is still JSON and as long as before."""
    path = newest(folder) / "values.json"
    text = path.read_text()
    assert json.loads(text) != json.loads(text.replace("0", "1", 1))
    path.write_text(text.replace("0", "1", 1))


def rewrite(folder, change):
    """A checkpoint that is whole by its hashes and still no good."""
    scratch = folder / "scratch"
    found = load_checkpoint(scratch)
    tensors = {name: tensor.whole() for name, tensor in found.tensors.items()}
    values = dict(found.values)
    step = change(tensors, values) or found.step
    shutil.rmtree(newest(folder))
    save_tensors(scratch, step, tensors, values)


BREAKS = {
    "torn": tear,
    "a flipped bit": flip_a_bit,
    "a changed digit": change_a_digit,
    "no tensors": lambda folder: (newest(folder) / "tensors.safetensors").unlink(),
    "no manifest": lambda folder: (newest(folder) / "manifest.json").unlink(),
    "an empty manifest": lambda folder: (newest(folder) / "manifest.json").write_text("{}"),
    "not a folder": lambda folder: (folder / "scratch/checkpoint-00000099").write_text("?"),
    "not a number": lambda folder: (folder / "scratch/checkpoint-last").mkdir(),
    "a wrong shape": lambda folder: rewrite(
        folder, lambda tensors, _: tensors.update({"model/weight.bias": torch.zeros(2)})
    ),
    "a missing weight": lambda folder: rewrite(
        folder, lambda tensors, _: tensors.pop("model/weight.bias") and None
    ),
    "a strange tensor": lambda folder: rewrite(
        folder, lambda tensors, _: tensors.update({"critic/weight.bias": torch.zeros(1)})
    ),
    "no history": lambda folder: rewrite(folder, lambda _, values: values.clear()),
    "too short a history": lambda folder: rewrite(
        folder, lambda _, values: values["history"].pop() and None
    ),
    "a debris folder": lambda folder: (folder / "scratch/.checkpoint-00000009.tmp").mkdir(),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_checkpoint_that_is_no_good_is_passed_over_for_the_one_before(tmp_path, name):
    undisturbed = fit(context(tmp_path / "a"))
    folder = killed(tmp_path / "b")
    BREAKS[name](folder)
    first = []
    assert_same(undisturbed, fit(context(folder, lambda _, step: first.append(step))))
    whole = name in ("not a folder", "not a number", "a debris folder")
    assert first[0] == (7 if whole else 6)


def test_where_no_checkpoint_is_any_good_training_starts_afresh(tmp_path):
    undisturbed = fit(context(tmp_path / "a"))
    folder = killed(tmp_path / "b")
    for _ in range(2):
        tear(folder)
        newest(folder).rename(folder / "scratch" / newest(folder).name.replace("-", "-0"))
    first = []
    assert_same(undisturbed, fit(context(folder, lambda _, step: first.append(step))))
    assert first == list(range(1, NUM_STEPS + 1))


@pytest.fixture
def disk():
    """A real failure of the lowest kind: no file may grow past the size that it is filled to."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    set_to = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, free[1]))  # noqa: E731
    yield SimpleNamespace(fill=set_to, free=lambda: set_to(free[0]))
    set_to(free[0])


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(tmp_path, capsys, disk):
    undisturbed = fit(context(tmp_path / "a"))
    checkpoints = []

    def fill_and_free(ctx, step):
        if step == 3:
            disk.fill((ctx.folder / "metrics.jsonl").stat().st_size + 9)
        if step == 8:
            checkpoints.extend(path.name for path in (ctx.folder / "scratch").iterdir())
            disk.free()

    assert_same(undisturbed, fit(context(tmp_path / "b", fill_and_free)))
    assert sorted(checkpoints) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert "no checkpoint of step 3" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "b/scratch").step == NUM_STEPS - 1
    assert [row["step"] for row in logged(tmp_path / "b")] == list(range(1, NUM_STEPS + 1))


def test_told_to_stop_on_a_full_disk_it_goes_on_later_from_the_checkpoint_before(tmp_path, disk):
    undisturbed = fit(context(tmp_path / "a"))

    def stop(ctx, step):
        if step == 5:
            disk.fill(100)
            ctx.request_stop()

    with pytest.raises(Stopped):
        fit(context(tmp_path / "b", stop))
    disk.free()
    assert load_checkpoint(tmp_path / "b/scratch").step == 4
    assert_same(undisturbed, fit(context(tmp_path / "b")))
    assert len(logged(tmp_path / "b")) == NUM_STEPS


def test_a_step_is_durable_only_where_the_checkpoint_before_it_could_be_written(
    tmp_path, capsys, disk, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ctx = Context(stage="test", key="made", seed=3, folder=tmp_path, checkpoint_seconds=30)
    learner = Learner(torch.nn.Linear(4, 1), Optimization(learning_rate=0.05, max_grad_norm=1.0))
    steps = journal.Journal(ctx, {"model": learner}, None)

    def begin_at(seconds):
        now[0] = seconds
        steps.save({}, False, now=False)
        return steps.begin(2, "made").durable

    steps.end(1, {"loss": 1.0}, 1.0)
    disk.fill(10)
    assert not begin_at(40.0)
    assert not begin_at(50.0)
    assert capsys.readouterr().err.count("no checkpoint of step 1") == 1, "tried again at once"
    disk.free()
    assert begin_at(80.0)
    assert load_checkpoint(ctx.scratch).step == 1


def test_metrics_that_can_never_be_written_fail_the_stage(tmp_path, disk):
    ctx = context(tmp_path, lambda _, step: disk.fill(100) if step == 9 else None)
    with pytest.raises(OSError, match="File too large"):
        fit(ctx)


def test_what_was_measured_before_a_kill_is_not_measured_again(go_on, monkeypatch):
    monkeypatch.setattr(inference, "UNIT_ROWS", 4)
    whole, metrics = go_on("whole", [UPDATE], by("ppo"), micro_tokens=100)
    again, _ = go_on("again", [], by("ppo"))
    ctx = again.context(UPDATE, micro_tokens=100)
    measured = lambda: set((ctx.scratch / "parts").glob("trainer-*/*.json"))  # noqa: E731
    monkeypatch.setattr(ctx, "should_stop", lambda: len(measured()) == 2)
    with pytest.raises(Stopped):
        again.run(UPDATE, ctx)
    before = {path: path.stat().st_mtime_ns for path in measured()}
    assert len(before) == 2
    ctx = again.context(UPDATE, micro_tokens=100)
    seen = []
    look = lambda *_, **__: seen.append({path: path.stat().st_mtime_ns for path in before})  # noqa: E731
    monkeypatch.setattr(ctx, "progress", look)
    assert again.run(UPDATE, ctx) == metrics
    assert seen
    assert all(times == before for times in seen)
    for name, path in whole.paths(UPDATE)[1].items():
        assert again.contents(again.paths(UPDATE)[1][name]) == whole.contents(path), name


class Constant:
    """A model that says the same of every response."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self, value):
        self.value = value

    def logprobs(self, batch):
        return torch.full(batch.response_mask.shape, self.value)


def test_what_was_measured_of_another_policy_is_measured_again(tmp_path):
    def measured(value, policy_hash):
        rows = [{"policy_hash": policy_hash, "prompt_ids": [1], "response_ids": [2, 3]}]
        rows[0] |= {"prompt_id": "p", "sample_index": 0, "support": None, "loss_mask": None}
        constant = inference.Quantity("it", "them", lambda: Constant(value), Constant.logprobs)
        return inference.kept_over_responses(context(tmp_path), "trainer", rows, constant)

    assert measured(-1.0, "a") == [[-1.0, -1.0]]
    assert measured(-2.0, "a") == [[-1.0, -1.0]], "kept over a kill"
    assert measured(-2.0, "b") == [[-2.0, -2.0]]


def test_a_checkpoint_is_an_ordinary_safetensors_file_of_any_tensors(tmp_path):
    tensors = {
        "matrix": torch.randn(3, 4),
        "transposed": torch.randn(4, 3).T,
        "number": torch.tensor(3.0),
        "nothing": torch.zeros(0, 2),
        "half": torch.randn(5).bfloat16(),
        "counts": torch.arange(3),
        "flags": torch.tensor([True, False]),
    }
    save_tensors(tmp_path, 7, tensors, {})
    found = load_checkpoint(tmp_path).tensors
    read = {name: tensor.whole() for name, tensor in found.items()}
    for there in (read, load_file(tmp_path / "checkpoint-00000007/tensors.safetensors")):
        assert there.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert there[name].dtype == tensor.dtype
            assert there[name].shape == tensor.shape
            assert torch.equal(there[name], tensor)


def test_going_on_from_a_checkpoint_does_not_change_it(tmp_path):
    save_tensors(tmp_path, 7, {"moment": torch.zeros(1000)}, {})
    load_checkpoint(tmp_path).tensors["moment"].whole().add_(1)
    assert load_checkpoint(tmp_path).tensors["moment"].whole().sum() == 0


def test_a_checkpoint_is_written_without_a_second_copy_of_the_model(tmp_path):
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from stages.checkpoint import save_tensors\n"
        "tensors = {str(i): torch.ones(4_000_000) for i in range(16)}\n"
        # Not getrusage: a process starts there with the peak of the one that started it.
        "def peak():\n"
        "    said = Path('/proc/self/status').read_text()\n"
        "    return int(said.partition('VmHWM:')[2].split()[0])\n"
        "before = peak()\n"
        "save_tensors(Path(sys.argv[1]), 1, tensors, {})\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    # 256 MB of tensors, of which one has 16; it is told in KiB.
    assert int(done.stdout) < 64 * 1024


def test_an_error_of_the_disk_is_no_reason_to_drop_a_checkpoint(tmp_path, monkeypatch):
    folder = killed(tmp_path / "a")
    kept = sorted(path.name for path in (folder / "scratch").glob("checkpoint-*"))

    def stale(_):
        # A real file system gives ESTALE only when a server has gone and come back.
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "file_hash", stale)
        with pytest.raises(OSError, match="Stale"):
            fit(context(folder))
    assert sorted(path.name for path in (folder / "scratch").glob("checkpoint-*")) == kept
    assert_same(fit(context(tmp_path / "b")), fit(context(folder)))
