"""What a user finds in MLflow: which runs, under which, with which numbers, inputs and files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clone import DIGEST, FakeClone

from pipelines.ledger import files
from pipelines.ledger.state import State
from pipelines.ledger.task import Task
from pipelines.ledger.usage import Usage, usage_file
from pipelines.tracking.cursor import runs_page
from pipelines.tracking.metrics import HEADLINE, names_above
from stages.contracts.catalog import STAGES
from stages.contracts.params import Params


def artifact(clone: FakeClone, stage: str, path: str) -> str:
    run = clone.run_of(stage)
    return Path(clone.client.download_artifacts(run.info.run_id, path)).read_text()


def test_stages_hang_under_their_iteration_and_the_invocation(clone: FakeClone) -> None:
    for stage in ("sft", "rollout@iter_001", "rollout@iter_002", "evaluate_sft"):
        clone.run(stage)
    assert clone.sync() is None
    parent = clone.parent()
    assert parent.info.run_name == "grpo · verifier · brave-owl · dvc repro"
    iterations = {
        run.info.run_name: run.info.run_id
        for run in clone.runs("tags.`lockstep.kind` = 'iteration'")
    }
    assert set(iterations) == {"iter_001", "iter_002"}
    above = {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in clone.runs()}
    assert above == {
        "grpo · verifier · brave-owl · dvc repro": None,
        "iter_001": parent.info.run_id,
        "iter_002": parent.info.run_id,
        "sft": parent.info.run_id,
        "evaluate_sft": parent.info.run_id,
        "rollout@iter_001": iterations["iter_001"],
        "rollout@iter_002": iterations["iter_002"],
    }
    assert {run.info.status for run in clone.runs()} == {"FINISHED"}


def test_a_stage_run_has_params_tags_steps_and_summary(clone: FakeClone) -> None:
    entry = clone.run("policy_update@iter_001", {"loss": 0.25, "kl_to_reference": 0.03})
    clone.sync()
    run = clone.run_of("policy_update@iter_001")
    rate = Params().policy_update.learning_rate
    params = {"policy_update.learning_rate": str(rate), "rl.algorithm": "ppo"}
    assert params.items() <= run.data.params.items()
    assert {"loss": 0.25, "kl_to_reference": 0.03}.items() <= run.data.metrics.items()
    assert clone.steps(run, "step/loss") == [1, 2, 3]
    record = entry.record
    assert record is not None
    tags = run.data.tags
    assert tags["lockstep.stage"] == "policy_update"
    assert tags["lockstep.iteration"] == "iter_001"
    assert tags["lockstep.git_commit"] == "f00d"
    assert tags["lockstep.dvc_experiment"] == "brave-owl"
    assert tags["lockstep.profile"] == "laptop"
    assert tags["lockstep.host"] == "node-1"
    assert tags["lockstep.fingerprint"] == entry.spec.fingerprint
    for path, digest in record.outs.items():
        assert tags[f"lockstep.out.{path}"] == digest
        assert digest in tags["lockstep.output_hash"]
    assert run.info.end_time == int(record.ended * 1000)


def test_a_stage_run_has_what_all_its_attempts_cost(clone: FakeClone) -> None:
    entry = clone.entry("sft")
    for attempt, state in enumerate([State.FAILED, State.COMPLETED], start=1):
        usage = Usage(job=None, restart=0, host="node-1", begun=1.0, seconds=3600.0, start_up=0.0)
        usage = replace(usage, saved=1800.0, state=state, memory_peak=attempt << 30)
        files.write(usage_file(clone.start(entry), Task()), usage)
        clone.end(entry, state) if state is State.FAILED else clone.finish(entry)
        clone.sync()
    run = clone.run_of("sft")
    assert clone.steps(run, "cost/cpu_hours_lost") == [1, 2]
    history = clone.client.get_metric_history(run.info.run_id, "cost/cpu_hours_lost")
    assert [metric.value for metric in history] == [1.0, 0.5], "the second took half of it back"
    expected = {"cost/hours": 2.0, "cost/gpu_hours": 0.0, "cost/memory_peak_bytes": 2.0 * (1 << 30)}
    assert expected.items() <= run.data.metrics.items()


def test_the_digest_of_an_input_finds_every_stage_that_read_it(clone: FakeClone) -> None:
    clone.run("rollout@iter_001")
    clone.run("evaluate_sft")
    clone.sync()
    found = clone.runs(f"datasets.digest = '{DIGEST}'")
    assert {run.info.run_name for run in found} == {"rollout@iter_001", "evaluate_sft"}
    inputs = {
        item.dataset.name: item for item in clone.run_of("evaluate_sft").inputs.dataset_inputs
    }
    policy = inputs["artifacts/policies/sft/model"]
    assert policy.dataset.digest == DIGEST
    assert [tag.value for tag in policy.tags] == ["policy, reference"]


def test_config_logs_record_and_tables_are_artifacts(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = clone.begin("rollout@iter_001")
    clone.table(entry, [{"prompt": "1+1", "response": "two", "reward": 0.5}])
    clone.finish(entry)
    clone.sync()
    stage = "rollout@iter_001"
    assert "seed: 17" in artifact(clone, stage, "config.yaml")
    assert artifact(clone, stage, "logs/attempt_001/77_0_log.out") == "hello\n"
    assert json.loads(artifact(clone, stage, "spec.json"))["stage"] == stage
    assert json.loads(artifact(clone, stage, "record.json"))["stage"] == stage
    monkeypatch.setenv("MLFLOW_TRACKING_URI", clone.uri)
    run = clone.run_of(stage).info
    table = clone.client.load_table(run.experiment_id, "tables/samples.json", [run.run_id])
    assert table.to_dict("records") == [{"prompt": "1+1", "response": "two", "reward": 0.5}]


def test_the_report_is_in_its_run(clone: FakeClone) -> None:
    clone.run("report")
    clone.sync()
    assert artifact(clone, "report", "report/summary.md") == "report report"


def test_the_invocation_shows_the_learning_curve(clone: FakeClone) -> None:
    clone.run("evaluate_sft", {"accuracy": 0.3})
    clone.run("score@iter_001", {"reward_mean": 0.4})
    clone.run("evaluate@iter_001", {"accuracy": 0.5})
    clone.run("evaluate@iter_002", {"accuracy": 0.7})
    clone.sync()
    parent = clone.parent()
    history = clone.client.get_metric_history(parent.info.run_id, "accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.3), (1, 0.5), (2, 0.7)]
    assert parent.data.metrics["score/reward_mean"] == 0.4
    assert parent.data.params["evaluate.samples"] == "4"


def test_evaluations_of_all_kinds_have_the_same_names_in_the_invocation() -> None:
    plain = [name for name in STAGES if "accuracy" in names_above(name, "accuracy")]
    assert plain == [name for name, stage in STAGES.items() if stage.module == "stages.evaluate"]


def test_what_a_comparison_begins_with_stands_before_all_else(clone: FakeClone) -> None:
    clone.run("evaluate_sft", {"accuracy": 0.5, "pass_at_4": 0.9})
    clone.run("evaluate@iter_001", {"accuracy": 0.75})
    clone.run("score@iter_001", {"reward_mean": 1.0})
    clone.sync()
    parent = clone.parent()
    headline = [name for name in sorted(parent.data.metrics) if name.startswith("Headline/")]
    assert headline == ["Headline/accuracy"] == sorted(parent.data.metrics)[:1]
    assert clone.steps(parent, "Headline/accuracy") == [0, 1]
    assert len(HEADLINE) < 10


def test_the_page_with_the_runs_is_known_once_there_are_some(clone: FakeClone) -> None:
    assert runs_page(clone.repository) == ""
    clone.run("sft")
    clone.sync()
    experiment = clone.parent().info.experiment_id
    page = f"/#/experiments/{experiment}/runs?workflowType=machine_learning"
    assert runs_page(clone.repository) == page


def test_without_a_server_there_is_a_run_id_and_no_url(clone: FakeClone) -> None:
    entry = clone.run("sft")
    clone.sync()
    assert clone.cursor(entry)["run_id"] == clone.run_of("sft").info.run_id
    assert clone.cursor(entry)["url"] is None


def test_with_a_local_server_the_url_leads_to_it(clone: FakeClone) -> None:
    servers = {"mlflow": {"url": "http://127.0.0.1:5000"}}
    (clone.repository.home / "servers.json").write_text(json.dumps(servers))
    entry = clone.run("sft")
    clone.sync()
    run = clone.run_of("sft").info
    place = f"experiments/{run.experiment_id}/runs/{run.run_id}"
    assert (
        clone.cursor(entry)["url"]
        == f"http://127.0.0.1:5000/#/{place}?workflowType=machine_learning"
    )


def test_names_that_mlflow_does_not_take_are_bent_not_lost(clone: FakeClone) -> None:
    clone.run("score@iter_001", {"reward[len>3]@x": 1.0})
    assert clone.sync() is None
    assert clone.run_of("score@iter_001").data.metrics["reward_len_3_.x"] == 1.0
