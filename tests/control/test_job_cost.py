"""`lockstep cost` reads what jobs took off the ledger: every start, by every kind of executor."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.base import atomic
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.commands.cli import main
from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.identity.spec import Artifact
from pipelines.ledger import files
from pipelines.ledger.costs import Cost
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.usage import Usage
from pipelines.runs.status import StageStatus, render, with_costs
from pipelines.slurm.link import LinkOrder
from pipelines.slurm.spent import cost_of_entry
from tests.control.made_up import SPEC, write_outputs
from tests.ledger_values import LOCAL, ORIGIN, SLURM, launch, record, result, worker

HOUR = 3600.0
NOON = 1_790_000_000.0
FOUR_GPUS = Resources(nodes=2, tasks_per_node=2, gpus_per_node=2, cpus_per_task=3, device="cuda")


def note(attempt: Attempt, label: str = "00000", **changes: Any) -> None:
    """What a process has left in the attempt's folder."""
    plain = Usage(job="7", restart=0, host="n1", begun=NOON, seconds=HOUR)
    usage = replace(plain, **changes)
    files.write(attempt.folder / "usage" / f"{usage.restart:03}.{label}.json", usage)


def slurm_says(attempt: Attempt, *jobs: SlurmJob, ended: bool = True) -> None:
    attempt.write(SchedulerView(jobs={job.id: job for job in jobs}, ended=ended))


def complete(entry: Entry) -> None:
    write_outputs(entry)
    files.write(entry.folder / "record.json", record())


def in_hours(cost: Cost) -> dict[str, float]:
    """GPU-hours by what they were for, without what is nothing."""
    parts = {"computed": cost.computed, "waited": cost.waited, **cost.reasons}
    return {name: round(part.gpu_hours, 3) for name, part in parts.items() if part.gpu_hours}


def test_every_start_of_a_preempted_job_counts_and_slurm_knows_when_the_last_began(
    entry: Entry,
) -> None:
    attempt = entry.new_attempt(launch(SLURM, resources=FOUR_GPUS, time=NOON - HOUR / 2))
    saved_late = {"state": TaskState.STOPPED, "saved": HOUR, "start_up": 60.0}
    for rank, host in enumerate(["n1", "n1", "n2", "n2"]):
        label = f"{rank:05}"
        note(attempt, label, **saved_late, host=host, memory_peak=rank << 30)
        done = {"restart": 1, "begun": NOON + 2 * HOUR, "state": State.COMPLETED}
        note(attempt, label, **done, start_up=0.05 * HOUR, host="n3")
    # A tenth of an hour for an image of a container, before any process could note it.
    slurm_says(attempt, SlurmJob("7", "COMPLETED", used=1.1 * HOUR))
    complete(entry)
    cost = cost_of_entry(entry)
    assert in_hours(cost) == {
        "computed": pytest.approx(4 * (1 + 0.95)),
        "starting again": pytest.approx(4 * 0.15),
        "waited": pytest.approx(4 * (0.5 + 0.9)),
    }
    assert cost.held.cpu_hours == pytest.approx(4 * 3 * 2.1)
    assert cost.peak.memory_bytes == 5 << 30, "of the node with the most"
    assert (cost.attempts, cost.estimated) == (1, 0)


def test_a_failed_attempt_is_lost_but_for_what_the_good_one_after_it_used(entry: Entry) -> None:
    on_gpu = Resources(device="cuda:1")
    failed = entry.new_attempt(launch(LOCAL, resources=on_gpu))
    note(failed, job=None, state=State.FAILED, saved=0.75 * HOUR)
    failed.write(result("failed"))
    assert in_hours(cost_of_entry(entry)) == {"failed": 1.0}
    good = entry.new_attempt(launch(LOCAL, resources=on_gpu))
    note(good, job=None, state=State.COMPLETED, start_up=0.1 * HOUR)
    good.write(result())
    complete(entry)
    expected = {"computed": 0.75 + 0.9, "failed": 0.25, "starting again": 0.1}
    assert in_hours(cost_of_entry(entry)) == pytest.approx(expected)


def test_tasks_of_an_array_count_each_and_so_do_those_that_wait(entry: Entry) -> None:
    now = time.time()
    resources = Resources(gpus_per_node=1, shards=4)
    attempt = entry.new_attempt(
        launch(SLURM, resources=resources, num_shards=4, shards=(0, 1, 2, 3), time=now - 2 * HOUR)
    )
    attempt.write(worker(time=now - 2 * HOUR))
    for shard in range(2):
        note(attempt, f"{shard:05}", job=f"7_{shard}", begun=now - 2 * HOUR, state=TaskState.DONE)
    jobs = [SlurmJob(f"7_{shard}", "COMPLETED", used=HOUR) for shard in range(2)]
    jobs += [SlurmJob("7_2", "PENDING", used=0.0), SlurmJob("7_3", "VANISHED")]
    slurm_says(attempt, *jobs, ended=False)
    waited = pytest.approx(2.0, abs=0.3)
    assert in_hours(cost_of_entry(entry)) == {"computed": 2.0, "waited": waited}


@pytest.fixture
def at_work(entry: Entry) -> Iterator[Attempt]:
    """A process of this machine that runs."""
    with ExitStack() as stack:
        attempt = entry.new_attempt(launch(LOCAL, resources=Resources(cpus_per_task=4)))
        stack.enter_context(hold_lock(attempt.folder / "alive"))
        attempt.write(worker(pid=os.getpid(), time=time.time()))
        yield attempt


@pytest.mark.parametrize("clock", [-1e6, 0.0, 1e6])
def test_what_runs_counts_up_to_now_whatever_the_clock_of_its_node(
    at_work: Attempt, clock: float
) -> None:
    last_reading = time.time() - 20.0
    note(at_work, job=None, begun=last_reading - HOUR + clock)
    cost = cost_of_entry(at_work.entry)
    assert cost.lost.hours == 0
    assert HOUR <= cost.computed.hours * HOUR <= HOUR + 61
    assert cost.computed.cpu_hours == pytest.approx(4 * cost.computed.hours)
    assert cost.computed.gpu_hours == 0
    if not clock:
        assert cost.computed.hours * HOUR >= HOUR + 20, "also since its last reading"


def test_an_attempt_that_noted_nothing_is_estimated(entry: Entry) -> None:
    attempt = entry.new_attempt(launch(LOCAL))
    attempt.write(worker(time=NOON))
    attempt.write(result(started=NOON, ended=NOON + HOUR))
    complete(entry)
    cost = cost_of_entry(entry)
    assert (cost.computed.cpu_hours, cost.estimated) == (1.0, 1)


def test_a_job_whose_worker_never_came_cost_what_slurm_says(entry: Entry) -> None:
    """Its setup failed, after an hour."""
    attempt = entry.new_attempt(launch(SLURM, resources=FOUR_GPUS, time=NOON))
    slurm_says(attempt, SlurmJob("7", "FAILED", used=HOUR))
    assert in_hours(cost_of_entry(entry)) == {"killed": 4.0}


def test_a_link_of_a_chain_waits_for_nodes_only_once_its_inputs_are_there(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Both were submitted at the same time."""
    rollout = replace(SPEC, stage="rollout", inputs={"policy": Artifact("artifacts/model", "h")})
    for spec in (SPEC, rollout):
        folder = tmp_path / "chain" / "links" / spec.stage
        entry = ledger.find_or_create(spec, ORIGIN)
        attempt = entry.adopt_attempt(folder)
        files.write(folder / "link.json", LinkOrder(spec.stage, tmp_path, ORIGIN))
        atomic.write_json(folder / "resolved.json", {"version": 1, "attempt": str(attempt.folder)})
        begun = NOON if spec is SPEC else NOON + 1.5 * HOUR
        attempt.write(launch(SLURM, resources=FOUR_GPUS, time=NOON))
        note(attempt, begun=begun, state=State.COMPLETED)
        attempt.write(result(ended=begun + HOUR))
        complete(entry)
    assert in_hours(cost_of_entry(ledger.latest()["rollout"])) == {"computed": 4.0, "waited": 2.0}


def test_status_shows_gpu_hours_where_there_are_any(entry: Entry) -> None:
    attempt = entry.new_attempt(launch(LOCAL, resources=Resources(device="cuda")))
    note(attempt, job=None, state=State.FAILED)
    attempt.write(result("failed"))
    on_gpu = StageStatus("sft", "failed", gpus=1, log=str(attempt.folder))
    on_cpu = StageStatus("prepare", "failed", log=str(attempt.folder))
    shown = with_costs([on_gpu, on_cpu], only_gpus=True)
    head, first, second, *_ = render(shown).splitlines()
    place = head.index("GPU-hours")
    assert first[place:].startswith("1.00 (1.00 lost)")
    assert second[place:].strip() == ""
    assert "GPU-hours" not in render([on_cpu])
    assert with_costs([on_cpu], only_gpus=False)[0].as_json()["cost"]["lost"]["hours"] == 1.0


@pytest.mark.parametrize(
    ("executor", "resources", "gpus"),
    [
        (SLURM, {"gres": "gpu:h200:8", "nodes": 2}, 16),
        (SLURM, {"gres": "gpu:2"}, 2),
        (SLURM, {"gres": "shard:3,gpu"}, 1),
        (SLURM, {"device": "cuda", "tasks_per_node": 4}, 4),
        (SLURM, {}, 0),
        (LOCAL, {"gpus_per_node": 8}, 0),
        (LOCAL, {"device": "cuda"}, 1),
        (ExecutorKind.SESSION, {"device": "cuda", "gpus_per_node": 2}, 2),
    ],
)
def test_the_gpus_of_a_job_are_those_that_nobody_else_gets(
    executor: ExecutorKind, resources: dict[str, Any], gpus: int
) -> None:
    assert launch(executor, resources=Resources(**resources)).gpus_per_job == gpus


@pytest.fixture
def clone(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """With two stages that took two hours each, the second one after a night."""
    for name in ("dvc.yaml", "params.yaml"):
        (repository.root / name).write_text("")
    monkeypatch.chdir(repository.root)
    ledger = Ledger(repository.jobs)
    midnight = time.mktime((2026, 3, 2, 0, 0, 0, 0, 0, -1))
    for number, stage in enumerate(["sft", "rollout@iter_001"]):
        entry = ledger.find_or_create(replace(SPEC, stage=stage), ORIGIN)
        attempt = entry.new_attempt(launch(SLURM, resources=FOUR_GPUS, time=midnight - 3 * HOUR))
        begun = midnight + (number - 1) * HOUR
        note(attempt, begun=begun, seconds=2 * HOUR, state=State.COMPLETED)
        slurm_says(attempt, SlurmJob("7", "COMPLETED", used=2 * HOUR))
        complete(entry)
    return repository


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["cost", *words, "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line["held"]["gpu_hours"] for line in bill["lines"]}
    return lines, bill["total"]["held"]["gpu_hours"], bill["total"]["attempts"]


@pytest.mark.usefixtures("clone")
def test_costs_are_summed_by_stage_or_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == ({"sft": 8.0, "rollout": 8.0}, 16.0, 2)
    assert told(capsys, "--by", "iteration")[0] == {"-": 8.0, "iter_001": 8.0}
    by_day = {"2026-03-01": 4.0, "2026-03-02": 12.0}
    assert told(capsys, "--by", "day") == (by_day, 16.0, 2)
    by_week = {"week of 2026-02-23": 4.0, "week of 2026-03-02": 12.0}
    assert told(capsys, "--by", "week") == (by_week, 16.0, 2)
    assert told(capsys, "--by", "month") == ({"2026-03": 16.0}, 16.0, 2)
    assert told(capsys, "--since", "2026-03-02")[0] == {"sft": 4.0, "rollout": 8.0}
    assert told(capsys, "--since", "2026-03-02T01:00")[0] == {"rollout": 4.0}
    assert told(capsys, "--stage", "rollout")[0] == {"rollout": 8.0}
    assert told(capsys, "--since", "1h") == ({}, 0.0, 0)
    main(["cost"])
    assert "total           2      16.00     16.00     0" in capsys.readouterr().out


@pytest.mark.usefixtures("clone")
def test_a_stage_or_a_time_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--stage", "roll"]) == 2
    assert "no job of roll is known here; there are: rollout@iter_001, sft" in (
        capsys.readouterr().err
    )
    assert main(["cost", "--since", "last week"]) == 2
    assert "--since 'last week' is no time: write 12h, 7d or 2w" in capsys.readouterr().err


def test_a_session_costs_what_it_was_idle(
    clone: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = clone.home / "sessions/gpu/001"
    session = Attempt(folder)
    session.write(launch(LOCAL, resources=Resources(device="cuda")))
    session.write(worker(time=NOON))
    session.write(result(started=None, ended=NOON + 5 * HOUR, why="idle"))
    entry = Ledger(clone.jobs).find_or_create(replace(SPEC, stage="score"), ORIGIN)
    attempt = entry.new_attempt(
        launch(
            ExecutorKind.SESSION,
            resources=Resources(device="cuda"),
            session=folder,
            time=NOON + HOUR,
        )
    )
    note(attempt, job=None, begun=NOON + 2 * HOUR, state=State.COMPLETED)
    complete(entry)
    assert told(capsys, "--stage", "score", "--stage", "session gpu-001")[0] == {
        "score": 1.0,
        "session gpu-001": 4.0,
    }
