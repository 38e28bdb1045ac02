"""A small pipeline whose every stage takes long enough to be hit, and what it makes in peace."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.clones import copy_clone
from tests.conftest import TINY, Clone, copy_tree

SMALL = {
    **TINY,
    "sft__epochs": 60,
    "reward_model__epochs": 40,
    "policy_update__epochs": 8,
}
PROFILE = """\
description: This machine; checkpoints all the time, so that a kill is followed by a resume.
executor: local
parallel: 2
defaults: {cpus_per_task: 1, checkpoint_seconds: 0.2}
"""


@pytest.fixture(scope="session")
def fresh_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which nothing has run."""
    clone = copy_tree(tmp_path_factory.mktemp("fresh") / "clone")
    clone.set_params(**SMALL)
    (clone.root / "slurm_profiles/local.yaml").write_text(PROFILE)
    clone.commit("small")
    clone.run("git", "gc", "--quiet")  # a thousand files less in every copy
    return clone.root


@pytest.fixture(scope="session")
def peaceful_root(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of it in which the whole pipeline has run, in a session and undisturbed."""
    clone = copy_of(fresh_root, tmp_path_factory.mktemp("peaceful") / "clone")
    began = time.monotonic()
    with clone.session():
        clone.run("lockstep", "run")
    (clone.root.parent / "seconds").write_text(str(time.monotonic() - began))
    clone.run("lockstep", "sync")
    yield clone.root
    clone.kill_all()


@pytest.fixture(scope="session")
def prepared_root(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it in which only `prepare` has run."""
    clone = copy_of(fresh_root, tmp_path_factory.mktemp("prepared") / "clone")
    clone.without_tracking()
    clone.run("dvc", "repro", "prepare")
    return clone.root


@contextmanager
def copy_to_torment(source: Path, target: Path) -> Iterator[Clone]:
    """A copy whose last process ends with the block; what is left of a failure can be looked at."""
    shutil.rmtree(target, ignore_errors=True)
    clone = copy_of(source, target)
    try:
        yield clone
    finally:
        clone.kill_all()


def copy_of(source: Path, target: Path) -> Clone:
    return Clone(copy_clone(source, target))
