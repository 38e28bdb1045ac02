"""Warnings while a stage runs and after it: progress line, `lockstep status`, tags in MLflow."""

import io
import json
import re
import threading
import time

import pytest
from fake_clone import FakeClone
from mlflow.entities import Run

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.config.profiles import ExecutorKind
from pipelines.driver.activity import activity
from pipelines.driver.driver import Driver
from pipelines.driver.executors import make_executor
from pipelines.identity.hashing import HashCache
from pipelines.ledger.entry import Entry
from pipelines.ledger.invocation import new_invocation
from pipelines.runs.status import render, stage_statuses
from pipelines.tracking.health import Health
from stages.health import Symptom
from stages.progress import Pace
from tests.ledger_values import launch
from tests.waiting import FOR_EVER_S, TIMEOUT_S

SFT = {"entropy": 1.0, "kl_to_reference": 0.0, "accuracy_sampled": 0.5}
GOOD = {"entropy": 0.8, "kl_to_reference": 0.02, "accuracy_sampled": 0.6}
COLLAPSED = {"entropy": 0.05, "kl_to_reference": 0.03, "accuracy_sampled": 0.4}


def log_steps(clone: FakeClone, entry: Entry, count: int, **metrics: float) -> None:
    """Steps of a job, appended as it does."""
    path = entry.folder / "metrics.jsonl"
    done = len(path.read_text().splitlines()) if path.exists() else 0
    clone.log(entry, range(done + 1, done + count + 1), **metrics)


def warned(run: Run) -> dict[str, str]:
    return {
        key.removeprefix("lockstep.warning."): value
        for key, value in run.data.tags.items()
        if key.startswith("lockstep.warning.")
    }


def iteration_run(clone: FakeClone, name: str) -> Run:
    [run] = clone.runs(
        f"tags.`lockstep.kind` = 'iteration' and tags.`lockstep.iteration` = '{name}'"
    )
    return run


def look(clone: FakeClone, entry: Entry) -> tuple[Symptom, ...]:
    return Health(clone.root).of(entry.stage, entry)


@pytest.fixture
def running(clone: FakeClone) -> Entry:
    """An update that runs, after an SFT policy that was evaluated."""
    clone.run("evaluate_sft", SFT)
    entry = clone.begin("policy_update@iter_001")
    return entry


def test_a_running_update_is_judged_by_its_last_steps(clone: FakeClone, running: Entry) -> None:
    log_steps(clone, running, 20, entropy=0.9, kl_to_reference=0.01)
    assert look(clone, running) == ()
    log_steps(clone, running, 5, entropy=0.1, kl_to_reference=0.7)
    assert [symptom.kind for symptom in look(clone, running)] == ["entropy_collapse", "kl_blow_up"]
    log_steps(clone, running, 5, entropy=0.5, kl_to_reference=0.1)
    assert look(clone, running) == ()


def test_the_progress_line_and_the_status_bear_a_mark(clone: FakeClone, running: Entry) -> None:
    log_steps(clone, running, 6, entropy=0.1, kl_to_reference=0.01)
    report = Pace().report(6, 9, "steps", {"entropy": 0.1})
    atomic.write_json(running.folder / "progress.json", report)
    shown = activity(running, running.state(), look(clone, running))
    assert shown.startswith("! entropy collapse  steps 6/9  ")

    statuses = stage_statuses(clone.repository)
    by_stage = {status.stage: status for status in statuses}
    [symptom] = by_stage["policy_update@iter_001"].warnings
    assert not by_stage["evaluate_sft"].warnings
    table = render(statuses).splitlines()
    [row] = [line for line in table if line.startswith("policy_update@iter_001  ")]
    assert row.endswith("! entropy collapse")
    assert (
        f"policy_update@iter_001: warning: {symptom.sentence} (to try: {symptom.advice})" in table
    )
    told = json.loads(json.dumps(by_stage["policy_update@iter_001"].as_json()))["warnings"]
    assert told == [
        {
            "kind": "entropy_collapse",
            "policy": "iter_001",
            "metric": "entropy",
            "value": pytest.approx(0.1),
            "threshold": pytest.approx(0.2),
            "sentence": symptom.sentence,
            "advice": symptom.advice,
        }
    ]


def test_an_evaluation_of_earlier_params_is_not_compared(clone: FakeClone) -> None:
    """By dvc.lock; the numbers of one that was made since, and is not in it yet, count."""
    clone.run("evaluate_sft", SFT)
    entry = clone.run("evaluate@iter_001", COLLAPSED)
    lock = {
        name: {
            "cmd": "true",
            "params": {"params.yaml": {"seed": seed}},
            "outs": [{"path": path, "md5": HashCache().of(clone.root / path)}],
        }
        for name, path, seed in (
            ("evaluate_sft", "metrics/evaluations/sft.json", 17),
            ("evaluate@iter_001", "metrics/evaluations/iter_001.json", 16),
        )
    }
    atomic.write_json(clone.root / "dvc.lock", {"schema": "2.0", "stages": lock})
    assert look(clone, entry) == ()
    lock["evaluate@iter_001"]["params"] = {"params.yaml": {"seed": 17}}
    atomic.write_json(clone.root / "dvc.lock", {"schema": "2.0", "stages": lock})
    assert "entropy_collapse" in [symptom.kind for symptom in look(clone, entry)]
    lock["evaluate@iter_001"]["params"] = {"params.yaml": {"seed": 16}}
    atomic.write_json(clone.root / "dvc.lock", {"schema": "2.0", "stages": lock})
    (clone.root / "metrics/evaluations/iter_001.json").write_text(json.dumps(COLLAPSED) + " ")
    assert "entropy_collapse" in [symptom.kind for symptom in look(clone, entry)]


class Terminal(io.StringIO):
    """Keeps what a person would see."""

    def isatty(self) -> bool:
        return True


def test_a_driver_tells_of_a_warning_when_it_comes_and_at_the_end(
    clone: FakeClone, running: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    atomic.write_json(running.folder / "progress.json", Pace().report(6, 9, "steps", {}))
    log_steps(clone, running, 6, entropy=0.1, kl_to_reference=0.01)
    screen = Terminal()
    driver = Driver(
        repository=clone.repository,
        entry=running,
        executors=lambda kind: make_executor(kind, clone.repository),
        launch=launch(ExecutorKind.DEBUG),  # which leaves signals alone
        invocation=new_invocation("test"),
        console=Console(screen),
        identity=lambda: running.spec.fingerprint,
        health=Health(clone.root),
    )
    summary = {"entropy": 0.4, "zero_variance_share": 0.95}

    def complete_once_it_is_told() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        wanted = (": warning: ", "! entropy collapse  steps 6/9")
        while time.monotonic() < deadline and not all(w in screen.getvalue() for w in wanted):
            time.sleep(0.05)
        clone.complete(running, summary)

    ending = threading.Thread(target=complete_once_it_is_told)
    ending.start()
    driver.run()
    ending.join()
    said = re.split(r"[\r\n]", screen.getvalue())
    end = next(i for i, line in enumerate(said) if ": done in " in line)
    warnings = [(i > end, line) for i, line in enumerate(said) if ": warning: " in line]
    assert [(late, "entropy of iter_001" in line) for late, line in warnings] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    assert "95% of the prompts that iter_001 learnt from" in warnings[-1][1]
    assert any("policy_update@iter_001: ! entropy collapse  steps 6/9" in line for line in said)


def test_the_first_steps_are_too_few_to_tell(clone: FakeClone, running: Entry) -> None:
    log_steps(clone, running, 4, entropy=0.01, kl_to_reference=1.0)
    assert look(clone, running) == ()


def test_without_an_evaluation_the_stage_is_judged_by_its_own_start(clone: FakeClone) -> None:
    entry = clone.begin("policy_update@iter_001")
    log_steps(clone, entry, 5, entropy=0.8)
    log_steps(clone, entry, 5, entropy=0.17)
    assert look(clone, entry) == ()
    log_steps(clone, entry, 5, entropy=0.15)
    [symptom] = look(clone, entry)
    assert "sft's 0.8" in symptom.sentence


def test_entropy_on_other_texts_than_its_own_is_judged_by_the_stages_own_start(
    clone: FakeClone,
) -> None:
    (clone.root / "params.yaml").write_text("rl: {preferences: {dpo: {policy: sft}}}\n")
    clone.run("evaluate_sft", {"entropy": 4.0})
    entry = clone.begin("preference@dpo")
    log_steps(clone, entry, 10, entropy=0.5)
    assert look(clone, entry) == ()


def test_a_long_file_is_read_at_its_ends_alone(clone: FakeClone, running: Entry) -> None:
    log_steps(clone, running, 3000, entropy=0.9, kl_to_reference=0.01)
    log_steps(clone, running, 5, entropy=0.9, kl_to_reference=0.8)
    assert (running.folder / "metrics.jsonl").stat().st_size > 2 * 64 * 1024
    assert [symptom.value for symptom in look(clone, running)] == [pytest.approx(0.8)]


def test_nothing_is_read_twice_within_a_second(
    clone: FakeClone, running: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.tracking.health.INTERVAL_S", FOR_EVER_S)
    health = Health(clone.root)
    assert health.of(running.stage, running) == ()
    log_steps(clone, running, 9, entropy=0.1)
    assert health.of(running.stage, running) == ()
    assert health.of(running.stage, running, now=True)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("params.yaml", "seed: [\n"),
        ("params.yaml", None),
        ("metrics/evaluations/sft.json", '{"entr'),
        ("metrics.jsonl", "torn\n" * 9),
        ("metrics.jsonl", "{}\n" * 9),
    ],
)
def test_a_look_never_fails(clone: FakeClone, running: Entry, file: str, text: str | None) -> None:
    log_steps(clone, running, 9, entropy=0.1)
    assert look(clone, running)
    path = (running.folder if file == "metrics.jsonl" else clone.root) / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert look(clone, running) == ()


def test_what_another_job_left_is_not_taken_for_what_dvc_restored(clone: FakeClone) -> None:
    clone.run("evaluate_sft", SFT)
    entry = clone.begin("policy_update@iter_001")
    log_steps(clone, entry, 9, entropy=0.1)
    clone.finish(entry, {"entropy": 0.1})
    assert look(clone, entry)
    metrics = clone.root / entry.spec.metrics
    metrics.unlink()
    metrics.write_text(json.dumps({"entropy": 0.9}))
    assert look(clone, entry) == ()


def test_runs_of_stage_iteration_and_invocation_are_tagged(clone: FakeClone) -> None:
    clone.run("evaluate_sft", SFT)
    clone.run("evaluate@iter_001", GOOD)
    clone.run("evaluate@iter_002", COLLAPSED)
    clone.sync()
    [sentence] = warned(clone.run_of("evaluate@iter_002")).values()
    assert sentence.startswith("entropy of iter_002 is 0.05, less than 0.2 of sft's 1")
    for run in (iteration_run(clone, "iter_002"), clone.parent()):
        assert warned(run) == {"entropy_collapse": sentence}
    for run in (iteration_run(clone, "iter_001"), clone.run_of("evaluate_sft")):
        assert warned(run) == {}


def test_a_warning_that_comes_while_a_stage_runs_goes_with_its_cause(
    clone: FakeClone, running: Entry
) -> None:
    log_steps(clone, running, 5, entropy=0.9, kl_to_reference=0.6)
    clone.sync()
    for run in (clone.run_of(running.stage), iteration_run(clone, "iter_001"), clone.parent()):
        assert warned(run).keys() == {"kl_blow_up"}
    log_steps(clone, running, 5, entropy=0.1, kl_to_reference=0.1)
    clone.sync()
    assert warned(clone.run_of(running.stage)).keys() == {"entropy_collapse"}
    log_steps(clone, running, 5, entropy=0.8, kl_to_reference=0.1)
    clone.finish(running)
    clone.sync()
    for run in (clone.run_of(running.stage), iteration_run(clone, "iter_001"), clone.parent()):
        assert warned(run) == {}


def test_a_threshold_that_was_changed_corrects_the_runs_found_up_to_date(clone: FakeClone) -> None:
    clone.run("evaluate_sft", SFT)
    last = clone.run("evaluate@iter_001", COLLAPSED)
    clone.sync()
    assert warned(clone.run_of(last.stage)).keys() == {"entropy_collapse"}
    (clone.root / "params.yaml").write_text("seed: 17\nwarn: {kl: 0.02, entropy_share: null}\n")
    record_in_lock(clone, last)
    clone.run("report", {"num_warnings": 1}, invocation="another")
    clone.sync()
    assert warned(clone.run_of(last.stage)).keys() == {"kl_blow_up"}
    [later] = clone.runs(
        "tags.`lockstep.invocation` = 'another' and tags.`lockstep.kind` = 'invocation'"
    )
    assert warned(later).keys() == {"kl_blow_up"}


def record_in_lock(clone: FakeClone, entry: Entry) -> None:
    """What DVC notes of a stage that it has run."""
    outs = [{"path": path, "md5": digest} for path, digest in entry.record.outs.items()]
    lock = {"schema": "2.0", "stages": {entry.stage: {"cmd": "x", "outs": outs}}}
    (clone.root / "dvc.lock").write_text(json.dumps(lock) + "\n")


def test_a_run_that_somebody_deleted_holds_up_no_tags(clone: FakeClone) -> None:
    clone.run("evaluate_sft", SFT)
    entry = clone.begin("evaluate@iter_001")
    clone.sync()
    clone.client.delete_run(clone.run_of("evaluate_sft").info.run_id)
    clone.finish(entry, COLLAPSED)
    assert clone.sync() is None
    assert warned(clone.parent()).keys() == {"entropy_collapse"}
