"""What an edit of the stages' code makes stale, by DVC and by the plan, in a clone that has run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.clones import copy_clone
from benchmarks.pretend import pretend_to_run
from pipelines.base.repository import Repository
from pipelines.dvc_repo import plan
from pipelines.dvc_repo.graph import open_repo
from pipelines.dvc_repo.plan import make_plan
from pipelines.runs.current_code import plan_stages
from pipelines.runs.status import stage_statuses
from tests.conftest import TINY, Clone, copy_tree

PARSER = "stages/data/formats/messages.py"
EVALUATE = "stages/evaluate.py"
EVALUATIONS = {"evaluate_sft", "evaluate@iter_001"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = copy_tree(tmp_path_factory.mktemp("code") / "done")
    clone.set_params(**TINY)
    clone.commit("tiny")
    pretend_to_run(clone.root)
    return clone.root


@pytest.fixture
def clone(done: Path, tmp_path: Path) -> Iterator[Clone]:
    clone = Clone(copy_clone(done, tmp_path / "clone"))
    clone.without_tracking()
    yield clone
    clone.kill_all()


def append(clone: Clone, name: str, text: str) -> None:
    path = clone.root / name
    path.write_text(path.read_text() + text)


def reasons(clone: Clone) -> dict[str, list[str]]:
    """Of each stage that is stale by itself, not because of one before it."""
    stale = {stage.address: stage.reasons for stage in make_plan(clone.root) if stage.stale}
    return {name: why for name, why in stale.items() if not why[0].startswith("after ")}


def test_a_clone_that_has_run_is_quiet(clone: Clone) -> None:
    assert reasons(clone) == {}
    assert "up to date" in clone.run("dvc", "status").stdout
    (clone.root / "stages/__pycache__").mkdir(exist_ok=True)
    for name in ("__pycache__/sft.cpython-311.pyc", "sft.pyc"):
        (clone.root / "stages" / name).write_text("compiled")
    assert reasons(clone) == {}
    assert "up to date" in clone.run("dvc", "status").stdout


def test_a_comment_reruns_nothing_but_the_stage_that_reads_the_code(clone: Clone) -> None:
    append(clone, EVALUATE, "\n# Evaluates.\n")
    assert reasons(clone) == {"code": ["input stages modified"]}
    assert {status.state for status in stage_statuses(Repository(clone.root))} == {"restored"}
    said = clone.run("lockstep", "plan").stdout
    assert "update  code" in said
    assert "0 to run" in said
    before = (clone.root / "dvc.lock").read_text()
    clone.run("dvc", "repro", "code")
    assert reasons(clone) == {}
    assert "up to date" in clone.run("dvc", "status").stdout
    after = (clone.root / "dvc.lock").read_text()
    assert [line for line in before.splitlines() if line not in after.splitlines()] != []
    assert clone.run("git", "status", "--porcelain", "--", "code").stdout == ""


def test_a_change_names_the_file_and_the_stages_that_import_it(clone: Clone) -> None:
    append(clone, EVALUATE, "\nMORE = 1\n")
    named = [f"code {EVALUATE} modified"]
    wanted = dict.fromkeys(EVALUATIONS, named)
    assert reasons(clone) == {"code": ["input stages modified"], **wanted}
    clone.run("dvc", "repro", "code")
    assert reasons(clone) == wanted, "also when the map has followed"
    shutil.rmtree(clone.root / ".lockstep/code_maps")
    assert reasons(clone) == wanted, "then git has the map of before"


def test_how_dvc_itself_is_asked_makes_no_difference(clone: Clone) -> None:
    append(clone, EVALUATE, "\nMORE = 1\n")
    (clone.root / "stages/more.py").write_text("")
    append(clone, PARSER, "\nimport stages.more\n")
    with open_repo(clone.root) as repo, repo.lock:
        its = {stage.address: stage for stage in plan._plan_of_dvc(repo, None)}
    own = {stage.address: stage for stage in make_plan(clone.root)}
    assert own["prepare"].reasons == [f"code {PARSER} modified", "code stages/more.py new"]
    for address, stage in own.items():
        assert (its[address].reasons, its[address].upstream) == (stage.reasons, stage.upstream)


def test_another_format_of_data_is_no_reason_to_sample_anew(clone: Clone) -> None:
    append(clone, PARSER, "\nMORE = 1\n")
    assert reasons(clone).keys() == {"code", "prepare"}


def test_what_was_computed_with_the_code_of_before_is_foreseen_and_restored(clone: Clone) -> None:
    """The plan looks into DVC's cache with the map that is going to be there."""
    lock = (clone.root / "dvc.lock").read_text()
    append(clone, EVALUATE, "\nMORE = 1\n")
    clone.run("dvc", "repro", "code")
    changed = (clone.root / EVALUATE).read_text()
    (clone.root / EVALUATE).write_text(changed.replace("\nMORE = 1\n", ""))
    assert reasons(clone).keys() == {"code"}
    (clone.root / "artifacts/evaluations/sft").unlink()
    found = {stage.address: stage.cached for stage in make_plan(clone.root) if stage.stale}
    assert found == {"code": False, "evaluate_sft": True, "evaluate@iter_001": True, "report": True}
    clone.run("dvc", "checkout", "-q", "artifacts/evaluations/sft")
    assert plan_stages(Repository(clone.root), ["report"])
    assert reasons(clone) == {}
    assert (clone.root / "dvc.lock").read_text() == lock


def test_a_stage_whose_map_is_behind_is_not_run(clone: Clone) -> None:
    append(clone, EVALUATE, "\nMORE = 1\n")
    words = ("dvc", "repro", "--single-item", "--force", "evaluate_sft")
    refused = clone.run(*words, check=False)
    assert refused.returncode != 0
    assert f"evaluate_sft: code/evaluate.json does not have the code as it is now ({EVALUATE})" in (
        refused.stdout
    )
    assert "dvc repro code" in refused.stdout
    assert not (clone.root / ".lockstep/jobs").exists(), "no job was asked for"


def test_code_is_brought_up_to_date_before_stages_are_run(clone: Clone) -> None:
    append(clone, EVALUATE, "\nMORE = 1\n")
    planned = plan_stages(Repository(clone.root), ["report"])
    assert "code" not in {stage.address for stage in planned}
    assert {s.address for s in planned if s.stale} == {*EVALUATIONS, "report"}
    assert reasons(clone).keys() == EVALUATIONS
    assert not (clone.root / ".lockstep/jobs").exists(), "and is no job"
    append(clone, EVALUATE, "\nMORE = = 1\n")
    done = clone.run("lockstep", "run", check=False)
    assert f"{EVALUATE}: Python cannot read it" in done.stdout
