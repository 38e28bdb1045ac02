"""What a job's process writes down about itself, whenever and however often Slurm starts it."""

from pathlib import Path

import pytest

from pipelines import atomic
from pipelines.ledger import Attempt, Entry, Ledger
from pipelines.publish import publish
from pipelines.spec import Artifact, Spec
from pipelines.worker import run_attempt

MADE_BY = {"host": "node1", "cpu": "A"}


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    """A stage on Slurm, its outputs complete."""
    spec = Spec(
        stage="sft",
        name="sft",
        key=None,
        config={"seed": 1},
        code="abc",
        inputs={"base": Artifact("artifacts/base", "h")},
        outs={"model": "artifacts/model"},
        metrics="metrics/sft.json",
    )
    entry = Ledger(tmp_path / ".lockstep/jobs").find_or_create(spec, {})
    (entry.out / "model").mkdir(parents=True)
    (entry.out / "model/weights").write_text("w")
    (entry.out / "metrics").write_text("{}")
    return entry


def start(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, restart: int = 0) -> str:
    """As srun starts the job's only process."""
    variables = {"PROCID": 0, "NTASKS": 1, "LOCALID": 0, "JOB_ID": 70, "RESTART_COUNT": restart}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return run_attempt(str(attempt.folder))


def new_attempt(entry: Entry) -> Attempt:
    return entry.new_attempt({"executor": "slurm", "num_shards": 1})


def test_a_finished_job_that_slurm_starts_again_keeps_its_record(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(entry)
    worker = {"pid": 1, "host": "node1", "time": 1.0, "environment": MADE_BY}
    result = {"state": "completed", "outs": {"artifacts/model": "m.dir"}, "metrics": {"loss": 1}}
    result |= {"started": 1.0, "ended": 2.0, "environment": MADE_BY}
    atomic.write_json(attempt.folder / "worker.json", worker)
    atomic.write_json(attempt.folder / "result.json", result)
    assert start(attempt, monkeypatch, restart=1) == "completed"
    assert (attempt.worker, attempt.result) == (worker, result)
    assert attempt.restarts == 1
    record = publish(tmp_path, entry)
    assert {key: record[key] for key in result if key != "state"} | {"state": "completed"} == result


@pytest.mark.parametrize("dead_before_its_word", [False, True])
def test_an_attempt_that_finds_all_done_says_nothing_about_who_made_it(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_before_its_word: bool
) -> None:
    made = new_attempt(entry)
    atomic.write_json(made.folder / "worker.json", {"time": 1.0, "environment": MADE_BY})
    if not dead_before_its_word:
        result = {"state": "completed", "outs": {"artifacts/model": "m.dir"}, "metrics": {}}
        result |= {"started": 1.0, "ended": 2.0, "environment": MADE_BY}
        atomic.write_json(made.folder / "result.json", result)
    again = new_attempt(entry)
    assert start(again, monkeypatch) == "completed"
    record = publish(tmp_path, entry)
    assert (record["environment"], record["started"]) == (MADE_BY, 1.0)
    assert record["started"] < record["ended"]
    assert record["attempts"] == 2
