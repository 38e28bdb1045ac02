"""`lockstep status` is about the workspace as it is now, whatever earlier params have left behind.

The stages have not run: what they leave is written, with a ledger that has a job for each.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.clones import copy_clone
from benchmarks.pretend import pretend_to_run
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.identity.code import code_version
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import make_spec
from pipelines.ledger import files
from pipelines.ledger.entry import Entry, Ledger
from pipelines.runs.status import StageStatus, render, stage_statuses
from stages.contracts.catalog import bind, bind_all
from tests.conftest import TINY, Clone, copy_tree
from tests.ledger_values import ORIGIN, launch, record, result, worker

METRICS = {
    "metrics/evaluations/sft.json": json.dumps({"entropy": 2.14}),
    "metrics/evaluations/iter_001.json": json.dumps({"entropy": 0.043}),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = copy_tree(tmp_path_factory.mktemp("status") / "done")
    clone.set_params(**TINY)
    pretend_to_run(clone.root, METRICS)
    for bound in bind_all(load_params(clone.root)):
        publish(job(clone.root, bound.address))
    return clone.root


@pytest.fixture
def clone(done: Path, tmp_path: Path) -> Clone:
    return Clone(copy_clone(done, tmp_path / "clone"))


def job(root: Path, address: str) -> Entry:
    """A job that computes the stage as it is now."""
    bound = bind(address, load_params(root))
    spec = make_spec(root, bound, HashCache(), code_version(root, bound.stage.module))
    entry = Ledger(Repository(root).jobs).find_or_create(spec, ORIGIN)
    entry.new_attempt(launch(time=time.time()))
    return entry


def end(entry: Entry, state: str) -> None:
    word = result(state, started=100.0, ended=115.0, error="what went wrong")
    entry.attempts()[-1].write(word)


def publish(entry: Entry) -> None:
    end(entry, "completed")
    root, hashes = entry.folder.parents[3], HashCache()
    outs = {path: hashes.of(root / path) for path in entry.spec.outs.values()}
    evaluates = entry.spec.metrics in METRICS
    metrics = json.loads((root / entry.spec.metrics).read_text()) if evaluates else {}
    made = record(outs=outs, metrics=metrics, fingerprint=entry.spec.fingerprint)
    files.write(entry.folder / "record.json", made)


@contextmanager
def alive(entry: Entry) -> Iterator[None]:
    attempt = entry.attempts()[-1]
    attempt.write(worker(host="node-1", time=time.time()))
    with hold_lock(attempt.folder / "alive"):
        yield


def statuses(clone: Clone) -> dict[str, StageStatus]:
    return {status.stage: status for status in stage_statuses(Repository(clone.root))}


def states(clone: Clone) -> dict[str, str]:
    return {name: status.state for name, status in statuses(clone).items()}


def test_stages_of_earlier_params_show_nothing_of_them(clone: Clone) -> None:
    before = statuses(clone)
    assert {status.state for status in before.values()} == {"up to date"}
    assert {status.elapsed for status in before.values()} == {15.0}
    [symptom] = before["evaluate@iter_001"].warnings
    assert "less than" in symptom.sentence

    clone.set_params(rl__algorithm="rloo")
    after = statuses(clone)
    changed = {name: status.state for name, status in after.items() if name in CHANGED}
    assert changed == CHANGED
    assert {after[name].state for name in after.keys() - CHANGED.keys()} == {"up to date"}
    for name in CHANGED:
        row = after[name].as_json()
        nothing = StageStatus(name, row["state"], row["iteration"], row["reason"]).as_json()
        assert row == nothing, "no time, job or warning of what the stage was before"
    table = render(list(after.values()))
    assert "param rl.algorithm modified" in table
    assert "after policy_update@iter_001" in table
    assert "entropy" not in table


CHANGED = {
    "policy_update@iter_001": "stale",
    "evaluate@iter_001": "waiting",
    "report": "waiting",
}


def test_a_job_counts_for_what_it_computes(clone: Clone) -> None:
    clone.set_params(rl__algorithm="rloo")
    entry = job(clone.root, "policy_update@iter_001")
    with alive(entry):
        assert states(clone)["policy_update@iter_001"] == "running"
        clone.set_params(rl__algorithm="grpo")
        status = statuses(clone)["policy_update@iter_001"]
        assert (status.state, status.elapsed) == ("stale", None)
        assert "computes it from other params, code or inputs" in status.reason
    clone.set_params(rl__algorithm="rloo")
    end(entry, "failed")
    failed = statuses(clone)["policy_update@iter_001"]
    assert (failed.state, failed.error) == ("failed", "what went wrong")
    (clone.root / "stages/policy_update.py").open("a").write("FIXED = True\n")
    assert states(clone)["policy_update@iter_001"] == "stale"


def test_what_is_up_to_date_by_an_earlier_job_is_restored(clone: Clone) -> None:
    """A later job was cancelled, with other params; then the first ones were put back."""
    shipped = (clone.root / "params.yaml").read_text()
    clone.set_params(rl__algorithm="rloo")
    end(job(clone.root, "policy_update@iter_001"), "cancelled")
    (clone.root / "params.yaml").write_text(shipped)
    found = statuses(clone)
    status = found.pop("policy_update@iter_001")
    assert (status.state, status.error, status.elapsed) == ("restored", None, 15.0)
    assert {other.state for other in found.values()} == {"up to date"}
    shutil.rmtree(clone.root / ".lockstep")
    assert set(states(clone).values()) == {"restored"}, "as after `dvc pull`"


def test_a_job_of_inputs_that_are_not_there_yet_counts_while_it_lives(clone: Clone) -> None:
    """As in a chain, whose jobs make their own inputs: DVC records them at the end."""
    clone.set_params(rollout__temperature=0.7)
    rollout = job(clone.root, "rollout@iter_001")
    score = job(clone.root, "score@iter_001")
    with alive(rollout), alive(score):
        found = states(clone)
        assert (found["rollout@iter_001"], found["score@iter_001"]) == ("running", "running")
        assert found["policy_update@iter_001"] == "waiting"
    end(score, "failed")
    assert states(clone)["score@iter_001"] == "waiting", "it failed on other inputs, perhaps"


def test_a_fresh_clone_waits_for_its_first_stage(clone: Clone) -> None:
    for name in (".lockstep", "artifacts", "metrics"):
        shutil.rmtree(clone.root / name)
    (clone.root / "dvc.lock").unlink()
    found = statuses(clone)
    assert (found["prepare"].state, found["prepare"].reason) == ("stale", "has not run yet")
    assert {status.state for name, status in found.items() if name != "prepare"} <= {
        "waiting",
        "stale",
    }
    assert found["sft"].reason == "after prepare"


def test_where_dvc_cannot_tell_the_last_jobs_are_shown(clone: Clone) -> None:
    (clone.root / "dvc.yaml").write_text("stages: [")
    assert set(states(clone).values()) == {"published"}
