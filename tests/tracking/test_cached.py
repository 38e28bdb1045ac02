"""A stage that was up to date is linked from the invocation to the run that made it."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_clone import FakeClone
from ruamel.yaml import YAML

from pipelines.config.params import load_params
from pipelines.driver.stage import describe_command
from pipelines.ledger.entry import Entry
from pipelines.ledger.invocation import new_invocation
from pipelines.tracking.cursor import end_invocation, note_restored


def lock(clone: FakeClone, *entries: Entry, **params: Any) -> None:
    """dvc.lock as DVC leaves it after these entries."""
    stages = {}
    for entry in entries:
        record, spec = entry.record, entry.spec
        assert record is not None
        made = {path: digest for other in entries for path, digest in other.record.outs.items()}
        stages[entry.stage] = {
            "cmd": f"lockstep stage {entry.stage}",
            "deps": [
                {"path": item.path, "md5": made.get(item.path, item.hash)}
                for item in spec.inputs.values()
            ],
            "params": {"params.yaml": {"seed": 17, **params}},
            "outs": [
                {"path": path, "md5": digest}
                for path, digest in [*record.outs.items(), (spec.metrics, "0" * 32)]
            ],
        }
    YAML().dump({"schema": "2.0", "stages": stages}, clone.root / "dvc.lock")


def test_the_invocation_links_what_it_found_up_to_date(clone: FakeClone) -> None:
    sft = clone.run("sft", {"loss": 0.1}, invocation="first")
    clone.sync()
    rollout = clone.run("rollout@iter_001", invocation="second")
    lock(clone, sft, rollout)
    clone.sync()
    [second] = clone.runs("tags.`lockstep.group` = 'second'")
    run = clone.run_of("sft").info
    assert second.data.tags["lockstep.cached.sft"] == run.run_id
    assert second.data.metrics["sft/loss"] == 0.1
    note = second.data.tags["mlflow.note.content"]
    place = f"#/experiments/{run.experiment_id}/runs/{run.run_id}"
    assert f"| sft | up to date | [{run.run_id}]({place}?workflowType=machine_learning) |" in note
    assert "| rollout@iter_001 | published |" in note
    assert "lockstep.cached.rollout.iter_001" not in second.data.tags


def test_the_run_of_another_clone_is_found_by_its_output(
    make_clone: Callable[[str], FakeClone], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_clone("one"), make_clone("two")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", one.uri)
    sft = one.run("sft")
    one.sync()
    rollout = two.run("rollout@iter_001", invocation="second")
    lock(two, sft, rollout)
    two.sync()
    [second] = two.runs("tags.`lockstep.group` = 'second'")
    assert second.data.tags["lockstep.cached.sft"] == one.run_of("sft").info.run_id


def test_what_is_stale_is_not_called_up_to_date(clone: FakeClone) -> None:
    sft = clone.run("sft", invocation="first")
    rollout = clone.run("rollout@iter_001", invocation="first")
    other = clone.run("reward_model", invocation="second")
    lock(clone, sft, rollout, other, **{"sft.learning_rate": 9.9})
    (clone.root / "params.yaml").write_text("seed: 17\n")
    clone.sync()
    [second] = clone.runs("tags.`lockstep.group` = 'second'")
    assert not [tag for tag in second.data.tags if tag.startswith("lockstep.cached")]


def test_a_command_that_only_restored_has_a_run_with_all_that_it_found(clone: FakeClone) -> None:
    sft = clone.run("sft", {"loss": 0.1}, invocation="first")
    lock(clone, sft)
    clone.sync()
    invocation = new_invocation("lockstep run")
    origin = describe_command(clone.repository, load_params(clone.root), invocation)
    note_restored(clone.repository, origin, ["sft"])
    clone.sync()
    [run] = clone.runs(f"tags.`lockstep.group` = '{invocation.id}'")
    assert run.info.status == "RUNNING", "the command is not over yet"
    end_invocation(clone.repository, invocation.id)
    assert clone.sync() is None
    [run] = clone.runs(f"tags.`lockstep.group` = '{invocation.id}'")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ppo · reward_model · seed 17 · lockstep run"
    assert run.data.tags["lockstep.cached.sft"] == clone.run_of("sft").info.run_id
    assert "| sft | restored |" in run.data.tags["mlflow.note.content"]
    assert run.data.metrics["sft/loss"] == 0.1
