"""Tiny models of many kinds, made here; nothing is downloaded."""

import pytest
import torch

from tests.stages.conftest import Runner


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def runner(tmp_path):
    """A factory of runners, each in a folder of its own."""
    return lambda name="run", **changes: Runner(tmp_path / name, **changes)
