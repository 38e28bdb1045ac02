"""What the dead left goes, what the living are at stays, on this host and on others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.base import atomic
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.ledger.cleanup import remove_stale_files
from pipelines.ledger.entry import Attempt
from tests.ledger_values import SLURM, launch, result

DAYS_S = 2 * 86400.0


@pytest.fixture
def entry(repository: Repository) -> Path:
    """One whose only attempt has failed."""
    folder = repository.jobs / "sft/abc-001"
    attempt = Attempt(folder / "attempts/001")
    attempt.write(result("failed"))
    attempt.write(launch())
    return folder


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def write(path: Path, age_s: float = 0.0) -> Path:
    """A folder with a file in it, last written so long ago."""
    path.mkdir(parents=True)
    (path / "weights").write_text("w")
    for each in (path / "weights", path):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def test_stale_files_of_the_dead_go_and_what_the_living_write_stays(
    repository: Repository, dead: int
) -> None:
    host = atomic.here()
    home, entry = repository.home, repository.jobs / "sft/abc-001"
    entry.mkdir(parents=True)
    mine = entry / f".launch.json.{host}.{os.getpid()}.tmp"
    theirs = [
        home / f".hashes.json.{host}.{dead}.tmp",
        entry / f".tracking.json.{host}.{dead}.tmp",
        entry.with_name(f".def-001.{host}.{dead}.tmp") / "entry.json",
        entry / "out.recorded/model",
    ]
    for path in (mine, *theirs):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    scratch = entry / "scratch"
    scratch.mkdir()
    remove_stale_files(repository)
    assert mine.exists()
    assert scratch.exists(), "the stage is not over"
    assert not any(path.exists() for path in theirs)
    (entry / "record.json").write_text("{}")
    remove_stale_files(repository)
    assert not scratch.exists()


def test_half_written_outputs_of_the_dead_go_though_nobody_runs_the_stage_again(
    repository: Repository, entry: Path, dead: int
) -> None:
    of_the_dead = write(entry / f"out.00000.{atomic.here()}.{dead}")
    of_the_living = write(entry / f"out.00001.{atomic.here()}.{os.getpid()}", DAYS_S)
    on_another_host = write(entry / f"out.00002.elsewhere.{dead}")
    long_ago_there = write(entry / f"out.00003.elsewhere.{dead}", DAYS_S)
    remove_stale_files(repository)
    assert not of_the_dead.exists()
    assert of_the_living.exists()
    assert on_another_host.exists(), "nobody here can tell"
    assert not long_ago_there.exists()


def test_another_hosts_outputs_stay_while_its_attempt_goes_on(
    repository: Repository, entry: Path
) -> None:
    Attempt(entry / "attempts/002").write(launch(SLURM, jobs=("7",)))
    out = write(entry / "out.00000.elsewhere.7", DAYS_S)
    remove_stale_files(repository)
    assert out.exists()


def test_a_published_stage_leaves_nothing_at_once(
    repository: Repository, entry: Path, dead: int
) -> None:
    left = [write(entry / f"out.00000.{host}.{dead}") for host in (atomic.here(), "elsewhere")]
    left.append(write(entry / "publishing"))
    (entry / "record.json").write_text("{}")
    with hold_lock(entry / "working.00000"), hold_lock(entry / "driver"):
        remove_stale_files(repository)
        assert all(path.exists() for path in left), "a second worker and a second publisher"
    remove_stale_files(repository)
    assert not any(path.exists() for path in left)


def test_what_was_being_published_by_the_dead_goes_after_some_minutes(
    repository: Repository, entry: Path
) -> None:
    publishing = write(entry / "publishing")
    remove_stale_files(repository)
    assert publishing.exists()
    os.utime(publishing / "weights", (0, 0))
    os.utime(publishing, (0, 0))
    remove_stale_files(repository)
    assert not publishing.exists()


def test_files_aside_of_another_container_or_host_go_after_a_day(
    repository: Repository, dead: int
) -> None:
    """A container with the host's name has process numbers of its own."""
    names = [f"{atomic.here()}~4026532999", "elsewhere"]
    young = [write(repository.home / f".young.{name}.{dead}.tmp") for name in names]
    old = [write(repository.home / f".old.{name}.{dead}.tmp", DAYS_S) for name in names]
    remove_stale_files(repository)
    assert all(path.exists() for path in young)
    assert not any(path.exists() for path in old)


def test_a_chain_that_is_over_gives_its_copies_back_and_one_that_is_not_keeps_them(
    repository: Repository,
) -> None:
    chains = {name: repository.home / "chains" / name for name in ("over", "queued", "fresh")}
    for name, chain in chains.items():
        link = Attempt(chain / "links/sft")
        link.write(launch(SLURM, jobs=("7",)))
        write(chain / "links/sft/placing")
        write(chain / "workspace")
        if name != "queued":
            link.write(result())
        if name != "fresh":
            for path in (chain / "links/sft", chain):
                os.utime(path, (0, 0))
    with hold_lock(chains["fresh"] / "links/sft/resolve.lock"):
        remove_stale_files(repository)
        assert (chains["fresh"] / "links/sft/placing").exists(), "it is being handed on"
    for chain in chains.values():
        os.utime(chain / "links/sft", None if chain.name == "fresh" else (0, 0))
    remove_stale_files(repository)
    assert not list(repository.home.glob("chains/*/links/*/placing"))
    left = sorted(path.parent.name for path in repository.home.glob("chains/*/workspace"))
    assert left == ["fresh", "queued"]
    assert all((chain / "links/sft/launch.json").exists() for chain in chains.values())
