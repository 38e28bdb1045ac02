"""The graph under DVC's own commands: what reruns, what is restored, what is compared."""

import json
import resource
import shlex
import shutil
from typing import Any

import pytest
from mlflow import MlflowClient

from pipelines.ledger.entry import Ledger
from tests.pipeline.conftest import stale

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _only_the_graph(finished: Any) -> None:
    finished.without_tracking()


LOOP = {"rollout@iter_001", "score@iter_001", "policy_update@iter_001", "evaluate@iter_001"}
EVERYTHING = {"prepare", "sft", "reward_model", "evaluate_sft", "report"} | LOOP


def jobs(clone: Any) -> set[str]:
    """Every job that was ever started here."""
    return {str(path.parent) for path in (clone.root / ".lockstep/jobs").glob("*/*/spec.json")}


def ran(clone: Any, before: set[str]) -> set[str]:
    """The stages of the jobs started since."""
    return {job.split("/")[-2] for job in jobs(clone) - before}


def cpu_seconds_of_children() -> float:
    """Of those that have ended; unlike a clock, it does not depend on what else runs here."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_repro_ran_every_stage_once_and_a_second_one_runs_nothing(finished: Any) -> None:
    before = jobs(finished)
    assert {job.split("/")[-2] for job in before} == EVERYTHING
    assert len(before) == len(EVERYTHING)
    assert "up to date" in finished.run("dvc", "repro").stdout
    before_it = cpu_seconds_of_children()
    output, _ = finished.start("lockstep", "run").communicate()
    assert "nothing to do" in output
    assert cpu_seconds_of_children() - before_it < 10
    assert jobs(finished) == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 18}, EVERYTHING),
        ({"prepare__prompts": 31}, EVERYTHING),
        ({"sft__learning_rate": 0.001}, EVERYTHING - {"prepare", "reward_model"}),
        ({"reward_model__centre": 0.5}, EVERYTHING - {"prepare", "sft", "rollout@iter_001"}),
        ({"rollout__samples": 3}, LOOP | {"report"}),
        ({"rollout__temperature": 0.5}, LOOP | {"evaluate_sft", "report"}),
        (
            {"policy_update__kl_coef": 0.5},
            {"policy_update@iter_001", "evaluate@iter_001", "report"},
        ),
        ({"evaluate__samples": 2}, {"evaluate_sft", "evaluate@iter_001", "report"}),
        ({"preference__beta": 0.3}, {"report"}),
        ({"report__samples": 1}, {"report"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_param_makes_exactly_its_dependents_stale(
    finished: Any, change: dict[str, Any], expected: set[str]
) -> None:
    finished.set_params(**change)
    assert stale(finished) == expected


def test_a_threshold_of_the_warnings_reruns_the_report_alone(finished: Any) -> None:
    before = jobs(finished)
    finished.set_params(warn__truncation=1e-6)
    assert stale(finished) == {"report"}
    assert "see `lockstep status`" in finished.run("lockstep", "run").stdout
    assert ran(finished, before) == {"report"}
    assert "! truncation" in finished.run("lockstep", "status").stdout
    assert "Warning: Truncation" in (finished.root / "artifacts/report/summary.md").read_text()


def test_a_verifier_does_not_wait_for_the_reward_model(finished: Any) -> None:
    finished.set_params(rl__reward="verifier", reward_model__centre=0.5)
    assert stale(finished) == {*LOOP, "evaluate_sft", "report"} - {"rollout@iter_001"}


def test_a_plan_tells_what_is_computed_from_what_is_restored(finished: Any) -> None:
    def planned() -> str:
        plan = json.loads(finished.run("lockstep", "plan", "--json", "report").stdout)
        row = next(row for row in plan if row["address"] == "report")
        return "restore" if row["cached"] else "run" if row["stale"] else "nothing"

    assert planned() == "nothing"
    finished.set_params(report__samples=1)
    assert planned() == "run"
    finished.run("dvc", "repro", "--single-item", "report")
    assert planned() == "nothing"
    finished.set_params(report__samples=2)
    assert planned() == "restore"
    shutil.rmtree(finished.root / "artifacts/report")
    assert planned() == "restore"


def test_only_dependents_run_and_going_back_restores_them(finished: Any) -> None:
    lock = (finished.root / "dvc.lock").read_bytes()
    before = jobs(finished)
    finished.set_params(evaluate__samples=2)
    finished.run("dvc", "repro")
    assert ran(finished, before) == {"evaluate_sft", "evaluate@iter_001", "report"}
    changed = jobs(finished)
    finished.set_params(evaluate__samples=1)
    restored = finished.run("dvc", "repro").stdout
    assert "is cached - skipping run" in restored
    assert jobs(finished) == changed
    assert (finished.root / "dvc.lock").read_bytes() == lock


def test_what_is_restored_is_restored_in_one_go_and_has_a_run_in_mlflow(finished: Any) -> None:
    del finished.variables["LOCKSTEP_TRACKING"]
    lock, before = (finished.root / "dvc.lock").read_bytes(), jobs(finished)
    for name in ("artifacts", "metrics"):
        shutil.rmtree(finished.root / name)
    plan = finished.run("lockstep", "plan").stdout
    assert "0 to run with profile local, 9 to restore, 0 up to date" in plan
    output = finished.run("lockstep", "run").stdout
    assert "0 of 9 stages to run, 9 to restore" in output
    [line] = [line for line in output.splitlines() if line.startswith("restored from DVC's cache")]
    assert all(stage in line for stage in EVERYTHING)
    [folder] = (finished.root / ".lockstep/runs").iterdir()
    assert [path.name for path in folder.iterdir()] == ["restored.log"], "one dvc process"
    assert jobs(finished) == before
    assert (finished.root / "dvc.lock").read_bytes() == lock
    assert "0 to run with profile local, 9 up to date" in finished.run("lockstep", "plan").stdout
    finished.run("lockstep", "sync")
    client = MlflowClient(f"sqlite:///{finished.root}/.lockstep/mlflow.db")
    experiment = client.get_experiment_by_name("lockstep").experiment_id
    [run] = client.search_runs([experiment], f"tags.`lockstep.group` = '{folder.name}'")
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"].count("| restored |") == 9


def test_a_restore_computes_nothing_where_the_cache_lacks_something_after_all(
    finished: Any,
) -> None:
    before = jobs(finished)
    finished.set_params(report__samples=1)
    words = ("dvc", "repro", "--single-item", "report")
    done = finished.run(*words, check=False, LOCKSTEP_ONLY_RESTORE="1")
    assert done.returncode != 0
    assert "report: DVC's cache does not have its outputs after all" in done.stdout
    assert jobs(finished) == before


def test_adding_an_iteration_runs_only_that_one_and_removing_it_restores(finished: Any) -> None:
    lock = (finished.root / "dvc.lock").read_bytes()
    before = jobs(finished)
    first = {"iter_001": {"policy": "sft"}}
    finished.set_params(rl__iterations={**first, "iter_002": {"policy": "iter_001"}})
    finished.run("lockstep", "run")
    added = {stage.replace("iter_001", "iter_002") for stage in LOOP}
    assert ran(finished, before) == {*added, "report"}
    changed = jobs(finished)
    finished.set_params(rl__iterations=first)
    said = finished.run("lockstep", "run").stdout
    assert "removed metrics/iterations/iter_002" in said
    assert jobs(finished) == changed
    recorded = (finished.root / "dvc.lock").read_bytes()
    assert [line for line in lock.splitlines() if line not in recorded.splitlines()] == []


def test_a_code_change_reruns_the_stages_that_import_it(finished: Any) -> None:
    path = finished.root / "stages/evaluate.py"
    path.write_text(path.read_text() + "\nMORE = 1\n")
    assert stale(finished) == {"code", "evaluate_sft", "evaluate@iter_001", "report"}


def test_a_profile_is_not_identity(finished: Any) -> None:
    path = finished.root / "slurm_profiles/local.yaml"
    memory = "gpu_memory: 80G, memory: 64G, memory_check: warn"
    defaults = f"defaults: {{cpus_per_task: 2, micro_tokens: 7, {memory}}}"
    path.write_text(f"executor: local\nparallel: 1\nfor_model: 8B\n{defaults}\n")
    assert stale(finished) == set()


def test_single_item_reruns_one_stage_when_forced(finished: Any) -> None:
    before = jobs(finished)
    finished.run("dvc", "repro", "--single-item", "--force", "report")
    assert ran(finished, before) == {"report"}
    assert "up to date" in finished.run("dvc", "status").stdout


def test_the_debug_profile_runs_a_stage_in_the_process_dvc_started(finished: Any) -> None:
    lock = (finished.root / "dvc.lock").read_bytes()
    finished.run(
        "dvc", "repro", "--single-item", "--force", "score@iter_001", LOCKSTEP_PROFILE="debug"
    )
    entry = Ledger(finished.root / ".lockstep/jobs").latest("score@iter_001")["score@iter_001"]
    (attempt,) = entry.attempts()
    assert attempt.launch is not None
    assert attempt.launch.job == "in-process"
    assert (finished.root / "dvc.lock").read_bytes() == lock


def test_experiments_and_comparisons_work_as_dvc_users_expect(finished: Any) -> None:
    finished.run("dvc", "exp", "run", "-n", "shorter", "-S", "report.samples=1")
    shown = json.loads(finished.run("dvc", "exp", "show", "--json").stdout)
    # What editors and Studio read: every file of it, without an error in the place of one.
    tried = [each for row in shown for exp in row.get("experiments") or () for each in exp["revs"]]
    assert "shorter" in {row["name"] for row in tried}
    for row in (shown[0], *tried):
        assert row.get("error") is None, row
        for kind in ("params", "metrics"):
            assert [path for path, of in row["data"][kind].items() if "data" not in of] == []
    assert "final_reward_mean" in shown[0]["data"]["metrics"]["metrics/report.json"]["data"]
    files = finished.run("dvc", "data", "status", "--granular", "--unchanged", "--json").stdout
    assert not {"uncommitted", "not_in_cache"} & json.loads(files).keys()
    readme = (finished.root / "README.md").read_text()
    line = next(line for line in readme.splitlines() if line.startswith("dvc exp show"))
    table = finished.run(*shlex.split(line, comments=True), "--no-pager", COLUMNS="100").stdout
    assert "final_reward_mean" in table
    assert "shorter" in table
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 100
    plots = json.loads(finished.run("dvc", "plots", "show", "--json").stdout)
    assert {"accuracy", "reward", "entropy"} <= set(plots["data"])
    params = json.loads(finished.run("dvc", "params", "diff", "--json").stdout)
    assert params["params.yaml"]["report.samples"]["new"] == 1
    finished.set_params(evaluate__samples=2)
    finished.run("dvc", "repro", "evaluate_sft")
    measured = "metrics/evaluations/sft.json"
    metrics = finished.run("dvc", "metrics", "diff", "--all", "--targets", measured).stdout
    assert "accuracy_sampled" in metrics
    assert "policy_update@iter_001" in finished.run("dvc", "dag", "--mermaid").stdout


def test_an_experiment_in_a_folder_of_its_own_leaves_the_workspace_alone(finished: Any) -> None:
    before = (finished.root / "params.yaml").read_text()
    words = ("dvc", "exp", "run", "--temp", "-n", "aside", "-S", "report.samples=1")
    # Of the servers that the other folder would start, this one stage needs none.
    finished.run(*words, LOCKSTEP_WARM="off")
    assert (finished.root / "params.yaml").read_text() == before
    assert "aside" in finished.run("dvc", "exp", "list").stdout
