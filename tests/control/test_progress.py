"""How far a stage is, how long it still takes, and what it is doing when it counts nothing."""

import io
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.repository import Repository
from pipelines.config.profiles import load_profile
from pipelines.driver.activity import activity
from pipelines.ledger import files
from pipelines.ledger.entry import Entry
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import State
from pipelines.runs.run import PipelineRun, _Running
from stages.context import Context
from stages.engines.forward.inference import logprobs_by, response_pass
from stages.progress import LINES, REPORT_S, Pace, describe
from tests.clock import Clock
from tests.control.made_up import SPEC
from tests.ledger_values import SLURM, launch, record, result, worker

ROOT = Path(__file__).resolve().parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hands = Clock()
    monkeypatch.setattr("stages.progress.time", SimpleNamespace(monotonic=hands, time=time.time))
    return hands


def reported(pace: Pace, *counts: Any) -> str:
    report = pace.report(*counts)
    assert report is not None
    return describe(report)


def test_the_rate_is_that_of_the_steps_and_not_of_what_came_before(clock: Clock) -> None:
    pace = Pace()
    clock.now += 40  # imports, the model, the first step
    assert reported(pace, 1, 376, "steps", {"loss": 3.0}) == "steps 1/376  loss 3"
    clock.now += 10
    assert reported(pace, 21, 376, "steps", {}) == "steps 21/376  2.0/s  2 min 58 s left"


def test_after_a_restart_the_steps_of_earlier_starts_make_nobody_faster(clock: Clock) -> None:
    pace = Pace()
    assert reported(pace, 5001, 6000, "steps", {}) == "steps 5001/6000"
    clock.now += 10
    assert "10.0/s  1 min 30 s left" in reported(pace, 5101, 6000, "steps", {})


def test_each_phase_has_its_own_name_and_rate(clock: Clock) -> None:
    pace = Pace()
    for done in (512, 1024, 2048):
        shown = reported(pace, done, 2048, "trainer log-probs", {})
        clock.now += 1
    assert shown == "trainer log-probs 2048/2048  768.0/s"
    clock.now += 30
    assert reported(pace, 1, 16, "steps", {}) == "steps 1/16"
    clock.now += 20
    assert reported(pace, 2, 16, "steps", {}) == "steps 2/16  20 s each  4 min 40 s left"


def test_a_pass_is_called_after_what_it_computes(tmp_path: Path) -> None:
    ctx = Context(stage="score", key=None, seed=1, folder=tmp_path)
    a_pass = response_pass(ctx, "critic", [], logprobs_by("reference", dict, 1.0))
    assert a_pass.phase == "reference log-probs"


def test_reports_are_not_more_frequent_than_anybody_reads(clock: Clock) -> None:
    pace = Pace()
    assert pace.report(1, 9, "steps", {})
    clock.now += REPORT_S / 2
    assert pace.report(2, 9, "steps", {}) is None
    assert pace.report(9, 9, "steps", {}), "the last one always counts"


def test_the_log_has_lines_of_steps_and_never_too_many(clock: Clock) -> None:
    pace = Pace()

    def lines(step_s: float) -> list[str]:
        written = []
        for step in range(1, 5001):
            clock.now += step_s
            report = pace.report(step, 5000, "steps", {"loss": 1 / step})
            if report and (line := pace.line(report)):
                written.append(line)
        return written

    slow = lines(30)
    assert slow[0] == "steps 1/5000  loss 1"
    assert slow[1].startswith("steps 51/5000  30 s each  ")
    assert slow[-1].startswith("steps 5000/5000  ")
    assert len(slow) == LINES + 1
    assert 40 < len(lines(0.1)) < 60, "one every ten seconds, where a percent takes five"


def test_what_a_stage_says_is_in_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctx = Context(stage="sft", key=None, seed=1, folder=tmp_path)
    ctx.progress(1, 9, "steps", loss=0.5)
    assert capsys.readouterr().out == "steps 1/9  loss 0.5\n"


def test_other_ranks_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Context(stage="sft", key=None, seed=1, folder=tmp_path, rank=1).progress(1, 2)
    assert not capsys.readouterr().out
    assert not (tmp_path / "progress.json").exists()


def queue(entry: Entry, reason: str) -> None:
    attempt = entry.new_attempt(launch(SLURM))
    attempt.write(SchedulerView(jobs={"7": SlurmJob("7", "PENDING", reason)}))


def test_a_held_job_says_what_it_waits_for(entry: Entry) -> None:
    queue(entry, "JobHeldUser")
    assert activity(entry, entry.state()) == "queued (JobHeldUser; scontrol release 7)"


def test_a_suspended_job_does_not_read_running(entry: Entry) -> None:
    queue(entry, "None")
    attempt = entry.attempts()[-1]
    attempt.write(worker())
    attempt.write(SchedulerView(jobs={"7": SlurmJob("7", "SUSPENDED", nodes="n1")}))
    assert entry.state() is State.SUSPENDED
    assert entry.state().alive
    atomic.write_json(entry.folder / "progress.json", Pace().report(3, 9, "steps", {}))
    assert activity(entry, entry.state()) == "suspended by Slurm  steps 3/9"


def test_the_line_of_a_run_follows_a_stage_to_its_end(repository: Repository, entry: Entry) -> None:
    queue(entry, "Priority")
    run = PipelineRun(repository, "local", load_profile(ROOT, "local"), Console(Terminal()), -1)
    before: set[float] = set()

    def shown() -> str:
        with subprocess.Popen(["true"]) as process:
            run.running[SPEC.stage] = _Running(process, None, before)
            run._show_progress()
        return run.console._shown.removeprefix(f"{SPEC.stage} ")

    assert shown() == "queued (Priority)"
    entry.out.mkdir()
    entry.attempts()[-1].write(result())
    assert shown() == "done; publishing its outputs"
    files.write(entry.folder / "record.json", record())
    assert shown() == "done; DVC records it"
    before.add(record().published)
    assert shown() == "starting", "that one was made by an earlier command"
