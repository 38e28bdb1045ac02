"""Checkpoints by way of the node's own disk: what a kill costs, and the same bytes after it.

A shared folder that is slow for as long as a test wants cannot be had: a copy to it is held by a
file (`held`), after half of it is written.
"""

import errno
import shutil
import threading
from pathlib import Path

import pytest
import torch

from stages import checkpoint
from stages.checkpoint import checkpoint_of, load_checkpoint, save_tensors
from stages.context import LocalScratch, Stopped
from stages.engines.processes.ranks import Ranks
from stages.engines.training import checkpoints
from stages.engines.training.drain import Drain
from tests.stages.test_resume import Told, assert_same, fit
from tests.waiting import until

copy = Drain._copy


def hold(gate: Path, monkeypatch):
    """From now on, copies to the shared folder stay half written while the gate is there."""

    def held(self, name):
        if gate.exists():
            half = (self._on_node / name).read_bytes()
            (self._aside / name).write_bytes(half[: len(half) // 2])
        while gate.exists():
            self._pause()
        copy(self, name)

    gate.touch()
    monkeypatch.setattr(Drain, "_copy", held)


def on_node(folder, local, after=None, make_room=lambda _: None, seconds=0.0):
    """A training on a node whose own disk is `local`, in the job's folder on the shared one."""
    for each in (folder, local):
        each.mkdir(exist_ok=True)
    ctx = Told(stage="test", key=None, seed=3, folder=folder, checkpoint_seconds=seconds)
    ctx.local = LocalScratch(local, make_room)
    ctx.after = after
    return ctx


def steps(folder):
    return [int(path.name.rpartition("-")[2]) for path in sorted(folder.glob("checkpoint-*"))]


def copying():
    return [thread for thread in threading.enumerate() if thread.name == "drain"]


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """What a kill leaves after six steps: just what lies there then, nothing of which changes.

    On its node's disk is the checkpoint of step 2, in the scratch that of 1 and half of that.
    """
    root, left = tmp_path_factory.mktemp("lives"), tmp_path_factory.mktemp("killed")
    gate = root / "gate"

    def after(ctx, step):
        if step == 2:
            until(lambda: steps(ctx.scratch) == [1], "the first checkpoint is in the scratch")
            until(lambda: not copying(), "nothing is on its way")
            hold(gate, monkeypatch)
        if step == 3:
            until(lambda: list(ctx.scratch.glob(".checkpoint-*/*")), "the next is half copied")
        if step == 6:
            for name in ("job", "disk"):
                shutil.copytree(root / name, left / name)
            gate.unlink()

    with pytest.MonkeyPatch.context() as monkeypatch:
        fit(on_node(root / "job", root / "disk", after))
    assert (steps(left / "job/scratch"), steps(left / "disk")) == ([1], [2])
    assert list(left.glob("job/scratch/.checkpoint-00000002.tmp/*"))
    return left


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ctx = Told(stage="test", key=None, seed=3, folder=folder, checkpoint_seconds=0)
    return fit(ctx)


@pytest.fixture
def killed(killed_once, tmp_path):
    """The folder of a job that was killed, and that of its node's disk."""
    for name in ("job", "disk"):
        shutil.copytree(killed_once / name, tmp_path / name)
    return tmp_path / "job", tmp_path / "disk"


def first_step(ctx):
    """Where a training goes on; it is stopped there."""

    def stop(ctx, step):
        begun.append(step)
        ctx.request_stop()

    begun, ctx.after = [], stop
    with pytest.raises(Stopped):
        fit(ctx)
    return begun[0]


def test_training_goes_on_while_a_checkpoint_is_copied_and_the_next_waits_for_it(
    tmp_path, monkeypatch, undisturbed
):
    gate = tmp_path / "gate"
    hold(gate, monkeypatch)

    def after(ctx, step):
        if step == 9:
            assert (steps(ctx.scratch), steps(tmp_path / "disk")) == ([], [1])
            gate.unlink()

    ctx = on_node(tmp_path / "job", tmp_path / "disk", after)
    assert_same(undisturbed, fit(ctx))
    assert steps(ctx.scratch)[0] == 1, "it is there at the end"
    assert load_checkpoint(ctx.scratch).step == steps(ctx.scratch)[-1]


def test_a_killed_training_goes_on_from_its_nodes_disk(killed, undisturbed):
    folder, local = killed
    assert first_step(on_node(folder, local)) == 3
    assert_same(undisturbed, fit(on_node(folder, local)))


def test_what_was_only_on_the_nodes_disk_is_copied_when_training_goes_on(killed):
    """So that a second kill, of the node, costs no more than the first."""
    folder, local = killed

    def after(ctx, _):
        until(lambda: steps(ctx.scratch) == [1, 2], "it is copied, whatever comes")
        ctx.request_stop()

    with pytest.raises(Stopped):
        fit(on_node(folder, local, after, seconds=10**6))


def test_a_checkpoint_is_begun_as_much_earlier_as_the_copy_before_took(killed, monkeypatch):
    """A copy that takes a known time cannot be had: it says that it took so long."""
    folder, local = killed
    long = property(lambda _: 10.0**6, lambda *_: None)
    monkeypatch.setattr(Drain, "seconds", long, raising=False)

    def after(_, step):
        if step == 4:
            until(lambda: not copying(), "what was only on the node is in the scratch")

    ctx = on_node(folder, local, after, seconds=10**6)
    fit(ctx)
    assert steps(ctx.scratch)[-1] >= 4


def test_a_lost_node_costs_one_checkpoint_and_nothing_half_made_is_read(
    tmp_path, killed, undisturbed
):
    folder, _ = killed
    other = tmp_path / "other-disk"
    assert first_step(on_node(folder, other)) == 2
    assert_same(undisturbed, fit(on_node(folder, other)))


def test_a_checkpoint_on_the_nodes_disk_that_is_damaged_or_half_written_is_passed_over(
    killed, undisturbed
):
    folder, local = killed
    tensors = checkpoint_of(local, 2) / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    (local / "checkpoint-00000009").mkdir()  # without its manifest: it was being written
    assert_same(undisturbed, fit(on_node(folder, local)))


def opens_when_it_waits(gate, monkeypatch, wait):
    """The steps that were waited for, by a method of the copy; the gate opens not before."""
    finished, method = [], getattr(Drain, wait)

    def finish(self):
        gate.unlink(missing_ok=True)
        finished.append(self.step)
        return method(self)

    hold(gate, monkeypatch)
    monkeypatch.setattr(Drain, wait, finish)
    return finished


def test_who_stops_within_a_step_leaves_what_was_saved_before_in_the_scratch(tmp_path, monkeypatch):
    finished = opens_when_it_waits(tmp_path / "gate", monkeypatch, "join")

    def after(_, step):
        if step == 4:
            raise Stopped("while it sampled")

    ctx = on_node(tmp_path / "job", tmp_path / "disk", after)
    with pytest.raises(Stopped, match="while it sampled"):
        fit(ctx)
    assert finished == steps(ctx.scratch) == [1]


def test_who_is_told_to_stop_leaves_its_last_step_in_the_scratch(
    tmp_path, monkeypatch, undisturbed
):
    """As before the time limit, or at preemption: the job goes on on another node."""
    folder = tmp_path / "job"
    finished = opens_when_it_waits(tmp_path / "gate", monkeypatch, "settle")

    def after(ctx, step):
        if step == 5:
            ctx.request_stop()

    with pytest.raises(Stopped, match="after step 5"):
        fit(on_node(folder, tmp_path / "disk", after, seconds=10**6))
    assert finished == [5], "while the ranks are together"
    assert first_step(on_node(folder, tmp_path / "other-disk")) == 6
    assert_same(undisturbed, fit(on_node(folder, tmp_path / "other-disk")))


def test_a_nodes_disk_that_fails_is_a_node_that_is_lost(killed, monkeypatch):
    """A disk that fails cannot be had."""

    def read(path):
        if path.is_relative_to(local):
            raise OSError(errno.EIO, "the disk is broken")
        return file_hash(path)

    (folder, local), file_hash = killed, checkpoint.file_hash
    monkeypatch.setattr(checkpoint, "file_hash", read)
    assert first_step(on_node(folder, local)) == 2


def test_training_goes_on_from_its_nodes_disk_where_the_shared_one_is_full(
    killed, monkeypatch, capsys, undisturbed
):
    def full(*_):
        raise OSError(errno.ENOSPC, "no room at all")

    monkeypatch.setattr(checkpoints, "begin_aside", full)
    assert_same(undisturbed, fit(on_node(*killed, seconds=10**6)))
    assert "step 2 is on this node's own disk only" in capsys.readouterr().err


def no_room(_):
    raise OSError(errno.ENOSPC, "no room for so much")


def test_a_full_local_disk_is_a_warning_and_the_scratch_has_the_checkpoints(
    tmp_path, capsys, undisturbed
):
    ctx = on_node(tmp_path / "job", tmp_path / "disk", make_room=no_room)
    assert_same(undisturbed, fit(ctx))
    assert steps(ctx.scratch) == [10, 11]
    assert steps(tmp_path / "disk") == []
    assert "step 3 goes to the shared folder only: [Errno 28]" in capsys.readouterr().err


def test_a_full_shared_disk_is_a_warning_and_the_last_whole_one_stays(
    tmp_path, monkeypatch, capsys, undisturbed
):
    def full(self, name):
        if self.step > 1:
            raise OSError(errno.ENOSPC, "no room at all")
        copy(self, name)

    def after(ctx, step):
        if step == 2:
            until(lambda: steps(ctx.scratch) == [1], "the first one is there")

    monkeypatch.setattr(Drain, "_copy", full)
    ctx = on_node(tmp_path / "job", tmp_path / "disk", after)
    assert_same(undisturbed, fit(ctx))
    assert steps(ctx.scratch) == [1]
    assert not list(ctx.scratch.glob(".checkpoint-*")), "it takes no room"
    said = capsys.readouterr().err
    assert "is on this node's own disk only" in said
    assert "no room at all" in said


def test_a_checkpoint_counts_when_all_ranks_have_copied_their_parts(tmp_path):
    """Two ranks, of which one comes late; what each does on its own, without collectives."""
    local, scratch = tmp_path / "disk", tmp_path / "scratch"
    for folder in (local, scratch, scratch / ".checkpoint-00000007.tmp"):
        folder.mkdir()
    save_tensors(local, 7, {"x": torch.ones(8)}, {})
    first = Drain(checkpoint_of(local, 7), scratch, 7, [], Ranks(0, 2))
    first._thread.join(1.0)
    assert not first.is_over, "it waits for the other one"
    assert load_checkpoint(scratch) is None
    second = Drain(checkpoint_of(local, 7), scratch, 7, ["tensors.safetensors"], Ranks(1, 2))
    assert second.join()
    assert first.join()
    assert load_checkpoint(scratch).step == 7
    files = sorted(path.name for path in checkpoint_of(scratch, 7).iterdir())
    assert files == ["manifest.json", "tensors.safetensors", "values.json"]


def test_a_rank_has_copied_only_once_it_has_said_so(tmp_path, monkeypatch):
    """Or rank 0 finishes what that one, which then fails, takes away again."""
    local, aside = tmp_path / "disk", tmp_path / "scratch/.checkpoint-00000007.tmp"
    for folder in (local, aside):
        folder.mkdir(parents=True)
    save_tensors(local, 7, {"x": torch.ones(8)}, {})
    seen = []

    def refused(_):
        seen.append(made[0]._own_done.is_set())
        raise OSError(errno.EDQUOT, "no more files")

    class Told(Drain):
        def _run(self):
            made.append(self)
            super()._run()

    made = []
    monkeypatch.setattr(Path, "touch", refused)
    own = ["tensors.safetensors"]
    assert not Told(checkpoint_of(local, 7), tmp_path / "scratch", 7, own, Ranks(1, 2)).join()
    assert seen == [False]


def test_a_rank_that_cannot_copy_ends_the_copy_of_all(tmp_path, monkeypatch):
    """Also where it is no longer waited for at that moment."""

    def full(self, _):
        self._ended.set()
        raise OSError(errno.ENOSPC, "no room at all")

    local, scratch = tmp_path / "disk", tmp_path / "scratch"
    for folder in (local, scratch, scratch / ".checkpoint-00000007.tmp"):
        folder.mkdir()
    save_tensors(local, 7, {"x": torch.ones(8)}, {})
    monkeypatch.setattr(Drain, "_copy", full)
    first = Drain(checkpoint_of(local, 7), scratch, 7, [], Ranks(0, 2))
    second = Drain(checkpoint_of(local, 7), scratch, 7, ["values.json"], Ranks(1, 2))
    assert not second.join()
    until(lambda: first.is_over, "the first one hears of it")
    assert not first.join()
    assert "rank 1 could not write" in str(first.error)
    assert list(scratch.iterdir()) == []
