"""Processes of rules that wait for the next pass: used again, unless they were ended."""

import os
from pathlib import Path

import psutil
import pytest

from stages.context import StageError
from stages.rewards.isolated import KeptWorkers
from tests.rewards.conftest import row, scored


@pytest.fixture
def workers():
    workers = KeptWorkers()
    yield workers
    workers.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process(os.getpid()).children()}


def test_a_process_is_used_again_for_the_same_rule_and_no_other(ctx, workers):
    before = children()
    by = {"kind": "pattern", "pattern": "yes"}
    assert scored(ctx, [row("yes")], Path(), workers, **by) == [1.0]
    first = children() - before
    assert scored(ctx, [row("no")], Path(), workers, **by) == [0.0]
    assert children() - before == first
    assert scored(ctx, [row("no")], Path(), workers, kind="pattern", pattern="no") == [1.0]
    assert len(children() - before) == 2
    workers.close()
    assert not children() - before


def test_one_that_was_ended_is_not_used_again(ctx, workers):
    by = {"kind": "pattern", "pattern": "^(a|aa)+$", "timeout": 0.5}
    with pytest.raises(StageError, match="did not finish within"):
        scored(ctx, [row("a" * 60 + "!")], Path(), workers, **by)
    assert scored(ctx, [row("aaa")], Path(), workers, **by) == [1.0]
