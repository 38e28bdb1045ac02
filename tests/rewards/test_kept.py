"""Processes of rules that wait for the next pass: used again, unless they were ended."""

import os
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from stages.context import Context, StageError
from stages.contracts.rewards import AnySource
from stages.rewards.given import given
from stages.rewards.isolated import KeptWorkers
from stages.rewards.named import NamedSource, open_scorer
from tests.rewards.conftest import row


@pytest.fixture
def workers():
    workers = KeptWorkers()
    yield workers
    workers.close()


def scored(ctx: Context, workers: KeptWorkers, response: str, **params) -> list[float]:
    source = NamedSource("mine", TypeAdapter(AnySource).validate_python(params), Path())
    rows = [given(row(response))]
    scorer = open_scorer(ctx, source, rows, workers)
    try:
        return scorer.score(rows)
    finally:
        scorer.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process(os.getpid()).children()}


def test_a_process_is_used_again_for_the_same_rule_and_no_other(ctx, workers):
    before = children()
    by = {"kind": "pattern", "pattern": "yes"}
    assert scored(ctx, workers, "yes", **by) == [1.0]
    first = children() - before
    assert scored(ctx, workers, "no", **by) == [0.0]
    assert children() - before == first
    assert scored(ctx, workers, "no", kind="pattern", pattern="no") == [1.0]
    assert len(children() - before) == 2
    workers.close()
    assert not children() - before


def test_one_that_was_ended_is_not_used_again(ctx, workers):
    by = {"kind": "pattern", "pattern": "^(a|aa)+$", "timeout": 0.5}
    with pytest.raises(StageError, match="did not finish within"):
        scored(ctx, workers, "a" * 60 + "!", **by)
    assert scored(ctx, workers, "aaa", **by) == [1.0]
