"""Shipping may be broken off and repeated anywhere: one run for an entry, each step once."""

import json
import os
from pathlib import Path

from fake_clone import FakeClone

from pipelines.ledger.entry import Entry
from pipelines.tracking.metrics import START, rows_after
from pipelines.tracking.rounds import ship_all
from pipelines.tracking.shipper import start_shipper
from tests.waiting import TIMEOUT_S, until


def rewind(entry: Entry, **changes: object) -> None:
    """Make the cursor lag behind MLflow, as a kill between MLflow's answer and the cursor does."""
    path = entry.folder / "tracking.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "done": False, **changes}))


def test_shipping_again_changes_nothing(clone: FakeClone) -> None:
    clone.run("rollout@iter_001")
    clone.sync()
    before = {run.info.run_id: run.data.to_dictionary() for run in clone.runs()}
    clone.sync()
    assert {run.info.run_id: run.data.to_dictionary() for run in clone.runs()} == before


def test_a_cursor_that_lags_or_is_lost_repeats_nothing(clone: FakeClone) -> None:
    entry = clone.run("sft")
    clone.sync()
    for forget in (
        lambda: rewind(entry, step=1, described=False, state=None, tables={}, logs=0),
        (entry.folder / "tracking.json").unlink,
        next(clone.repository.home.glob("tracking/*.json")).unlink,
    ):
        forget()
        assert clone.sync() is None
        run = clone.run_of("sft")
        assert clone.steps(run, "step/loss") == [1, 2, 3]
        assert clone.steps(run, "loss") == [0]
        assert clone.steps(clone.parent(), "sft/loss") == [0]


def test_a_resumed_job_goes_on_in_its_run(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=5)
    clone.sync()
    clone.die(entry)
    clone.sync()
    assert clone.run_of("sft").info.status == "FAILED"
    go_back(entry, 3)
    clone.start(entry)
    clone.log(entry, range(4, 9))
    clone.sync()
    assert clone.run_of("sft").info.status == "RUNNING"
    clone.finish(entry)
    clone.sync()
    run = clone.run_of("sft")
    assert run.info.status == "FINISHED"
    assert clone.steps(run, "step/loss") == list(range(1, 9))
    assert run.data.tags["lockstep.attempts"] == "2"
    logs = clone.client.list_artifacts(run.info.run_id, "logs")
    assert [item.path for item in logs] == ["logs/attempt_001", "logs/attempt_002"]


def go_back(entry: Entry, steps: int) -> None:
    """As a job that was killed does: it keeps its first steps, and takes the others anew."""
    path = entry.folder / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:steps]
    (entry.folder / "metrics.tmp").write_text("".join(kept))
    os.replace(entry.folder / "metrics.tmp", path)


def test_steps_that_a_resumed_job_takes_again_are_sent_once(clone: FakeClone) -> None:
    """By one shipper, which knows what it has sent."""
    entry, shipper = clone.begin("sft", steps=5), clone.tracker()
    assert shipper.sync() is None
    clone.die(entry)
    go_back(entry, 3)
    clone.start(entry)
    clone.log(entry, range(4, 9))
    assert shipper.sync() is None
    assert clone.steps(clone.run_of("sft"), "step/loss") == list(range(1, 9))


def test_steps_that_only_mlflow_knows_of_are_sent_once(clone: FakeClone) -> None:
    """The shipper was killed before it noted them, and the job takes them again."""
    entry = clone.begin("sft", steps=5)
    clone.sync()
    rewind(entry, step=2)
    clone.die(entry)
    go_back(entry, 2)
    clone.start(entry)
    clone.log(entry, range(3, 9))
    clone.sync()
    assert clone.steps(clone.run_of("sft"), "step/loss") == list(range(1, 9))


def test_a_second_attempt_that_fails_as_the_first_did_is_shipped_too(clone: FakeClone) -> None:
    entry = clone.entry("sft")
    for attempts in ("1", "2"):
        clone.start(entry)
        clone.end(entry, "failed", error="no luck")
        clone.sync()
        assert clone.run_of("sft").data.tags["lockstep.attempts"] == attempts


def test_a_line_that_is_being_written_waits(clone: FakeClone) -> None:
    entry = clone.begin("sft", steps=2)
    with (entry.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')
    assert clone.sync() is None
    assert clone.steps(clone.run_of("sft"), "step/loss") == [1, 2]


def test_a_shipper_killed_again_and_again_repeats_nothing(clone: FakeClone) -> None:
    steps = 4000
    # Its job goes on, or the shipper would end by itself once all is sent.
    entry = clone.begin("sft", steps=steps)
    step, reached = lambda: clone.cursor(entry).get("step") or 0, 0
    for _ in range(2):
        start_shipper(clone.repository)
        until(
            lambda: (step() > reached or step() == steps) and clone.shippers(),  # noqa: B023
            "a shipper at work",
            pause_s=0.001,
        )
        reached = step()
        clone.kill_shipper()
    clone.finish(entry)
    assert ship_all(clone.repository, TIMEOUT_S) == []
    assert clone.steps(clone.run_of("sft"), "step/kl") == list(range(1, steps + 1))
    assert len(clone.runs()) == 2


def test_a_file_written_anew_is_read_from_its_beginning_even_with_the_length_of_the_old(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 10}\n{"step": 2, "time": 11}\n')
    rows, place = rows_after(START, path)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows_after(place, path) == ([], place)
    path.write_text('{"step": 1, "time": 10}\n{"step": 2, "time": 27}\n{"step": 3, "time": 28}\n')
    assert [row["step"] for row in rows_after(place, path)[0]] == [1, 2, 3]
