"""Who is taken for lost while ranks wait for others that are at work on their own."""

import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stages.context import Context
from stages.engines.processes import heartbeats
from stages.engines.processes.bridge import Bridge
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.ranks import Ranks
from tests.waiting import until

TIMEOUT_S = 1.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.02)
    # As many heartbeats as a busy machine may keep one of the threads from.
    monkeypatch.setattr(heartbeats, "LOOK_S", 1.0)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Begins ranks of one job; what they say when they give up, in place of their end."""
    ranks, said = [], []
    monkeypatch.setattr(Heartbeats, "_give_up", lambda _, number, error: said.append(error))  # noqa: ARG005

    def begin(rank, together):
        made = Heartbeats(tmp_path, rank, 3, TIMEOUT_S, together)
        made.at = f"the place of {rank}"
        made.begin()
        ranks.append(made)
        return made

    yield begin, said
    for made in ranks:
        made.end()


def test_others_may_be_at_work_for_longer_than_the_timeout(begun):
    begin, said = begun
    waiting, _, _ = begin(0, range(2)), begin(1, range(2)), begin(2, range(2, 3))
    with waiting.waiting(patient=True):
        time.sleep(3 * TIMEOUT_S)
    assert not said


def test_one_that_falls_silent_at_work_is_lost(begun):
    begin, said = begun
    waiting, _, sampler = begin(0, range(2)), begin(1, range(2)), begin(2, range(2, 3))
    with waiting.waiting(patient=True):
        sampler.end()
        until(lambda: said, "it gives up")
    assert said[0].startswith("rank 2 on ")
    assert "has not come to the place of 0" in said[0]


def test_only_ranks_that_come_to_the_same_collectives_are_compared_by_them(begun):
    begin, said = begun
    waiting, behind, _ = begin(0, range(2)), begin(1, range(2)), begin(2, range(2, 3))
    for _ in range(2):
        with waiting.waiting():
            pass
    with behind.waiting():
        pass
    with waiting.waiting():
        until(lambda: said, "it gives up")
    assert said[0].startswith("rank 1 on ")
    assert "where 1 rank has waited" in said[0]
    assert "rank 2" not in said[0]


def test_weights_that_one_rank_sends_to_samplers_do_not_count(begun, tmp_path):
    begin, said = begun
    hangs, waiting, _ = begin(0, range(2)), begin(1, range(2)), begin(2, range(2, 3))

    def bridge(beats):
        ctx = Context("test", None, 0, tmp_path)
        return Bridge(ctx, beats, dist.HashStore(), timedelta(seconds=60))

    sender, other = bridge(hangs), bridge(waiting)
    forms = [(name, torch.Size([2]), torch.float32) for name in "abc"]
    sender.send(forms, ((name, torch.ones(2)) for name in "abc"))
    other.same([], source=0)
    with waiting.waiting():
        until(lambda: said, "it gives up")
    assert said[0].startswith("rank 0 on ")
    assert "has not come to the place of 1" in said[0]


def test_others_learn_of_a_failure_before_what_it_has_to_wait_for(tmp_path):
    """Such as a thread that still samples, which the error leaves only once it has ended."""
    own, other = (Heartbeats(tmp_path, rank, 2, 60) for rank in (1, 0))
    told = []

    def fail():
        with ExitStack() as left_last:
            left_last.callback(lambda: told.append(other.failure()))
            with Ranks(1, 2, heartbeats=own).failing_at_once():
                raise ValueError("a made-up trouble")

    with pytest.raises(ValueError, match="trouble"):
        fail()
    assert told == ["rank 1 failed at the start: a made-up trouble"]
