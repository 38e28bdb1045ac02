"""The states of policies go, the policies stay, and nothing is computed again for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from benchmarks.pretend import pretend_to_run
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.plan import PlannedStage, make_plan
from pipelines.ledger.publish import recorded_outs
from pipelines.results.verify import verify
from pipelines.results.verify_report import render
from pipelines.runs.exclusive import only_pipeline
from pipelines.runs.prune import prune_states
from tests.conftest import Clone, copy_tree

USED = ["artifacts/policies/iter_001/state", "artifacts/policies/iter_002/state"]
"""Of three iterations, each of which starts from the one before."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """The shipped pipeline, as if it had run. Read it only."""
    clone = copy_tree(tmp_path_factory.mktemp("done") / "clone")
    # A state that another output has as well, byte for byte.
    same = {"artifacts/policies/iter_002/state": "one", "artifacts/policies/iter_003/state": "one"}
    pretend_to_run(clone.root, same)
    return clone


@pytest.fixture
def clone(done: Clone, tmp_path: Path) -> Iterator[Clone]:
    clone = Clone(copy_clone(done.root, tmp_path / "clone"))
    clone.without_tracking()
    yield clone
    clone.kill_all()


def prune(clone: Clone, **options: Any) -> list[str]:
    return [state.path for state in prune_states(Repository(clone.root), **options)]


def stale(clone: Clone) -> dict[str, PlannedStage]:
    return {stage.address: stage for stage in make_plan(clone.root) if stage.stale}


def in_cache(clone: Clone, path: str) -> Path:
    stage = f"policy_update@{path.split('/')[2]}"
    md5 = recorded_outs(clone.root)[stage][path]
    return clone.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def test_states_that_were_used_go_and_everything_stays_up_to_date(clone: Clone) -> None:
    assert prune(clone, dry_run=True) == USED
    assert all((clone.root / path).exists() for path in USED)
    assert prune(clone) == USED
    assert not any((clone.root / path).exists() for path in USED)
    assert not in_cache(clone, USED[0]).exists()
    assert in_cache(clone, USED[1]).exists(), "another output has it, too"
    assert (clone.root / "artifacts/policies/iter_003/state").exists()
    assert (clone.root / "artifacts/policies/sft/state").exists()
    assert stale(clone) == {}
    assert {clone.status(f"policy_update@iter_00{i}")["state"] for i in (1, 2, 3)} == {"restored"}
    said = clone.run("dvc", "repro", "--allow-missing", "--dry").stdout
    assert "Running stage" not in said
    lineage = clone.run("lockstep", "lineage", "policy_update@iter_002").stdout
    assert "policy_update@iter_001" in lineage
    assert prune(clone) == []


def test_verify_says_what_was_pruned_and_finds_nothing_wrong(clone: Clone) -> None:
    prune(clone)
    outcome = verify(Repository(clone.root), ["policy_update"])
    assert (outcome.findings, outcome.pruned) == ([], USED)
    assert f"removed by `lockstep prune`: {', '.join(USED)}" in render(outcome, clone.root)


def test_the_last_ones_may_be_kept(clone: Clone) -> None:
    assert prune(clone, keep_last=1) == USED[:1]
    assert prune(clone, keep_last=5) == []


def test_those_that_nobody_has_used_go_where_all_are_asked_for(clone: Clone) -> None:
    last = "artifacts/policies/iter_003/state"
    assert prune(clone, unused=True) == [*USED, last]
    assert not in_cache(clone, last).exists()
    assert (clone.root / "artifacts/policies/iter_003/model").exists()
    assert (clone.root / "artifacts/policies/sft/state").exists()
    assert stale(clone) == {}
    starts = {"iter_001": "sft", "iter_002": "iter_001", "iter_003": "iter_002", "new": "iter_003"}
    clone.set_params(rl__iterations={key: {"policy": start} for key, start in starts.items()})
    reasons = stale(clone)["policy_update@iter_003"].reasons
    assert reasons == [f"output {last} was pruned and is needed again"]


def test_what_a_stale_stage_reads_is_kept(clone: Clone) -> None:
    (clone.root / "artifacts/rollouts/iter_003.parquet").write_text("other")
    assert "policy_update@iter_003" in stale(clone)
    assert prune(clone) == USED[:1]


def test_a_policy_that_goes_on_from_a_pruned_one_has_its_state_computed_again(
    clone: Clone,
) -> None:
    prune(clone)
    starts = {"iter_001": "sft", "iter_002": "iter_001", "iter_003": "iter_002", "new": "iter_002"}
    clone.set_params(rl__iterations={key: {"policy": start} for key, start in starts.items()})
    found = stale(clone)
    again = {name: stage.reasons for name, stage in found.items() if not name.endswith("@new")}
    assert again == {
        "policy_update@iter_001": [f"output {USED[0]} was pruned and is needed again"],
        "policy_update@iter_002": [f"output {USED[1]} was pruned and is needed again"],
        "report": found["report"].reasons,
    }
    assert not any("pruned" in reason for reason in found["report"].reasons)
    # Once it is there, it is what everybody reads.
    (clone.root / USED[0]).write_text(USED[0])
    (clone.root / USED[1]).write_text("one")
    in_cache(clone, USED[0]).parent.mkdir(exist_ok=True)
    in_cache(clone, USED[0]).write_text(USED[0])
    assert not any("policy_update@iter" in name for name in stale(clone))


def test_a_state_that_is_recorded_anew_is_no_longer_the_pruned_one(clone: Clone) -> None:
    prune(clone)
    lock = clone.root / "dvc.lock"
    md5 = recorded_outs(clone.root)["policy_update@iter_001"][USED[0]]
    lock.write_text(lock.read_text().replace(md5, "f" * 32))
    assert "policy_update@iter_001" in stale(clone)


def test_a_state_that_was_lost_is_computed_again(clone: Clone) -> None:
    (clone.root / USED[0]).unlink()
    in_cache(clone, USED[0]).unlink()
    assert "policy_update@iter_001" in stale(clone)


def test_killed_half_way_it_ends_the_work_the_next_time(clone: Clone) -> None:
    kept = in_cache(clone, USED[0]).read_bytes()
    prune(clone)
    in_cache(clone, USED[0]).write_bytes(kept)
    assert stale(clone) == {}
    assert prune(clone) == USED[:1]
    assert not in_cache(clone, USED[0]).exists()


def test_nothing_is_pruned_beside_a_run(clone: Clone) -> None:
    repository = Repository(clone.root)
    with (
        only_pipeline(repository, "lockstep run"),
        pytest.raises(LockstepError, match="another pipeline runs"),
    ):
        prune_states(repository)


def test_the_command_says_how_much_room_it_makes(clone: Clone) -> None:
    assert "2 states would be removed" in clone.run("lockstep", "prune", "--dry-run").stdout
    assert "1 state removed" in clone.run("lockstep", "prune", "--keep-last", "1").stdout
    assert clone.run("lockstep", "prune", "--keep-last=-1", check=False).returncode == 2
