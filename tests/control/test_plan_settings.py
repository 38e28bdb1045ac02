"""`lockstep plan -S key=value` says what the change would do, and leaves the workspace as it is."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides
from dvc.utils.serialize import load_yaml

from pipelines.base.repository import Repository
from pipelines.commands.cli import main
from pipelines.config.profiles import Resources
from pipelines.dvc_repo.plan import make_plan
from pipelines.ledger import files
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.last_times import last_time
from pipelines.ledger.launch import Launch
from tests.conftest import Clone, copy_tree
from tests.control.made_up import SPEC
from tests.control.test_plan import done, project, repro  # noqa: F401  (fixtures)
from tests.ledger_values import ORIGIN, launch, record, result, worker

FILES = ("params.yaml", "dvc.yaml", "dvc.lock")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return copy_tree(tmp_path_factory.mktemp("tree") / "clone")


@pytest.fixture
def clone(tree: Clone, monkeypatch: pytest.MonkeyPatch) -> Clone:
    monkeypatch.chdir(tree.root)
    return tree


@pytest.mark.parametrize(
    "settings",
    [
        ["step.size=0.7"],
        ["seed=2"],
        ["step.sizes=[1,3]"],
        ["+steps.four={from: two}"],
        ["~steps.three"],
        ["steps.three.from=one", "folder=data"],
        ["seed=1"],
    ],
)
def test_settings_are_planned_as_if_they_were_in_the_file(project: Path, settings: list[str]):  # noqa: F811
    copy = project.parent / "params.yaml"
    shutil.copyfile(project / "params.yaml", copy)
    apply_overrides(copy, settings)
    before = contents(project)
    foreseen = make_plan(project, values=load_yaml(str(copy)))
    assert contents(project) == before
    shutil.copyfile(copy, project / "params.yaml")
    assert foreseen == make_plan(project)


def test_what_dvc_has_for_these_settings_is_foreseen_as_restored(project: Path):  # noqa: F811
    old, values = (project / "params.yaml").read_text(), load_yaml(str(project / "params.yaml"))
    (project / "params.yaml").write_text(old.replace("[1, 2]", "[1, 3]"))
    assert repro(project)
    plan = make_plan(project, values=values)
    assert (
        {stage.address for stage in plan if stage.cached}
        == {stage.address for stage in plan if stage.stale}
        != set()
    )


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("+rl.iterations.iter_004={policy: iter_003}", "policy_update@iter_004"),
        ("params.yaml:+rl.iterations.other={policy: sft}", "rollout@other"),
    ],
)
def test_settings_may_change_the_graph(clone: Clone, capsys, setting: str, address: str):
    assert main(["plan", "-S", setting, "--json"]) == 0
    rows = {row["address"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[address]["stale"]
    assert rows[address]["resources"]["cpus_per_task"] >= 1
    assert address not in {stage.address for stage in make_plan(clone.root)}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            "sft.learning_rat=1",
            "there is no param sft.learning_rat; did you mean sft.learning_rate",
        ),
        ("sft.epochs=few", "params.yaml with -S sft.epochs=few: `sft.epochs` is 'few'"),
        ("seed=1,2", "plan one at a time"),
        ("seed", "write it as key=value"),
        ("other.yaml:seed=1", "stages read params.yaml alone"),
        ("rl.iterations.iter_001.policy=none", "neither 'sft' nor a policy above"),
        ("prepare.folder=artifacts/x", "which is computed after prepare"),
        ("seed={", "-S seed={: "),
        ("seed=${nowhere}", "-S seed=${nowhere}: "),
        ("seed=???", "-S seed=???: "),
        ("params.yaml:rl.iterations.iter-9.policy=sft", "there is no param rl.iterations.iter-9"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_by_name(clone: Clone, capsys, setting, expected):
    before = contents(clone.root)
    assert main(["plan", "-S", setting]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert "/tmp/" not in said
    assert contents(clone.root) == before


def test_a_plan_that_is_killed_has_changed_nothing(clone: Clone):
    before = contents(clone.root)
    for delay in (0.3, 0.8, 1.3, 1.8, 2.3):
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines", "plan", "-S", "sft.learning_rate=1"],
            cwd=clone.root,
            stdout=subprocess.DEVNULL,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert contents(clone.root) == before
        assert clone.run("git", "status", "--porcelain").stdout == ""


def test_the_time_of_a_stage_is_that_of_all_its_attempts(repository: Repository):
    entry = finished(repository, "sft", [(1.0, 31.0), (100.0, 190.0)], gpus=4)
    last = last_time(Ledger(repository.jobs), entry.stage)
    assert last is not None
    assert (last.seconds, last.gpus, last.attempts) == (120.0, 4, 2)
    assert last.gpu_seconds == 480


def test_a_stage_that_never_ran_takes_what_it_took_for_another_policy(repository: Repository):
    finished(repository, "rollout@iter_001", [(1.0, 61.0)])
    ledger = Ledger(repository.jobs)
    last = last_time(ledger, "rollout@iter_004")
    assert last is not None
    assert (last.stage, last.seconds) == ("rollout@iter_001", 60.0)
    assert last_time(ledger, "score@iter_001") is None
    finished(repository, "rollout@iter_004", [(1.0, 11.0)])
    mine = last_time(ledger, "rollout@iter_004")
    assert mine is not None
    assert mine.seconds == 10.0


def test_what_is_at_work_or_failed_has_no_time(repository: Repository):
    entry = Ledger(repository.jobs).find_or_create(SPEC, ORIGIN)
    attempt = entry.new_attempt(launch())
    attempt.write(result("failed"))
    assert last_time(Ledger(repository.jobs), entry.stage) is None


def test_a_plan_adds_up_the_times_that_are_recorded(clone: Clone, capsys):
    repository = Repository(clone.root)
    finished(repository, "sft", [(1.0, 3601.0)], gpus=2)
    finished(repository, "evaluate_sft", [(1.0, 61.0)])
    try:
        assert main(["plan", "-S", "sft.learning_rate=1e-3"]) == 0
        said = capsys.readouterr().out
        rows = {line.split()[1]: line for line in said.splitlines() if line.startswith("run ")}
        assert "1 h 00 min on 2 GPU" in rows["sft"]
        assert "1 min 00 s" in rows["evaluate_sft"]
        assert "about 1 h 01 min of jobs by their last times, 2 GPU hours; of " in said
        assert main(["plan", "--json", "sft"]) == 0
        rows = {row["address"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows["sft"]["last_time"]["seconds"] == 3600
        assert rows["prepare"]["last_time"] is None
    finally:
        shutil.rmtree(repository.home)


def finished(
    repository: Repository, stage: str, attempts: list[tuple[float, float]], gpus: int = 0
) -> Entry:
    """An entry of the ledger that was published."""
    entry = Ledger(repository.jobs).find_or_create(replace(SPEC, stage=stage), ORIGIN)
    how: Launch = launch(resources=Resources(gpus_per_node=gpus))
    for started, ended in attempts:
        attempt = entry.new_attempt(how)
        attempt.write(worker(time=started))
        attempt.write(result(started=started, ended=ended))
    files.write(entry.folder / "record.json", record(stage=stage, attempts=len(attempts)))
    return entry


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in FILES if (root / name).exists()}
