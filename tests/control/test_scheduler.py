"""What is made of Slurm's answers. A fake command line gives those that a real one cannot be made
to give at will: jobs that vanish, numbers used twice, accounting that knows better, no answer."""

import io
import os
import shlex
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.base import atomic
from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.processes import this_process
from pipelines.base.repository import Repository
from pipelines.config.profiles import Resources, load_profile
from pipelines.driver.executors import SlurmExecutor
from pipelines.identity.spec import Spec
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.ledger.state import State, TaskState
from pipelines.runs.run import PipelineRun, _Running
from pipelines.runs.status import render, stage_statuses
from pipelines.slurm import scheduler
from pipelines.slurm.outcome import outcome_here, outcome_in_session, outcome_of, tail
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.submit import just_wait, missing_shards, slurm_batches, submit_batches
from tests.ledger_values import ORIGIN, SLURM, launch, task_report, worker

FAKE = """#!/bin/sh
cd {folder}
echo "$(basename $0) $*" >> calls
[ -e silent ] && {{ echo "$(basename $0): error: Unable to contact slurm controller" >&2; exit 1; }}
case "$(basename $0)" in
  squeue) cat squeue 2>/dev/null || true ;;
  scontrol) cat "job-$4" 2>/dev/null || {{ echo "Invalid job id specified" >&2; exit 1; }} ;;
  sbatch) cat sbatch-says >&2; exit 1 ;;
  sacct) cat sacct 2>/dev/null || {{ echo "accounting storage is disabled" >&2; exit 1; }} ;;
esac
"""


ROOT = Path(__file__).resolve().parents[2]


class FakeSlurm:
    """Slurm's commands, answering what the test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used = "0:05"
        """How long a job has run, as squeue writes it."""
        (folder / "bin").mkdir(parents=True)
        for name in ("squeue", "scontrol", "sacct", "scancel", "sbatch", "srun"):
            path = folder / "bin" / name
            path.write_text(FAKE.format(folder=folder))
            path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def queue(self, *jobs: tuple[str, str, str, str]) -> None:
        """What squeue shows: number, state, reason and token of each job."""
        lines = [f"{i}|{s}|{r}|node1|{self.used}|lockstep-sft|lockstep:{t}" for i, s, r, t in jobs]
        (self.folder / "squeue").write_text("".join(line + "\n" for line in lines))

    def calls(self, command: str) -> int:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.startswith(command) for line in lines)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "fake/bin"), os.environ["PATH"]]))
    monkeypatch.setattr(scheduler, "CONFIRM_S", 0.0)
    monkeypatch.setattr(scheduler, "VANISH_S", 0.3)
    return fake


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "clone")


def submit(repository: Repository, stage: str = "sft", jobs: list[str] | None = None) -> Any:
    """An attempt as a driver leaves it; returns it with its token."""
    spec = Spec(stage, stage, None, {}, "c", {}, {"model": "m"}, "metrics.json")
    attempt = Ledger(repository.jobs).find_or_create(spec, ORIGIN).new_attempt(launch())
    resources = Resources(time_minutes=30, memory="1G")
    attempt.write(launch(SLURM, resources=resources, jobs=tuple(jobs or ())))
    token = Scheduler(repository).register(attempt.folder)
    Scheduler(repository).submitted(token, attempt.folder)
    return attempt, token


def refresh(repository: Repository) -> None:
    Scheduler(repository).refresh(now=True)


def test_how_long_a_job_has_run_is_by_slurms_clock(
    slurm: FakeSlurm, repository: Repository
) -> None:
    """Its node's clock is a day behind this host's."""
    attempt, token = submit(repository, jobs=["7"])
    (repository.root / "params.yaml").write_text("seed: 17\n")
    attempt.write(worker(time=time.time() - 86400))
    for state, used in (("RUNNING", "4:05"), ("SUSPENDED", "0-00:04:05")):
        slurm.used = used
        slurm.queue(("7", state, "None", token))
        refresh(repository)
        [status] = [row for row in stage_statuses(repository) if row.stage == "sft"]
        assert status.state == state.lower()
        assert "4 min 05 s of 30 min 00 s" in render([status])


def test_a_job_is_followed_from_the_queue_to_its_end(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    assert attempt.state() is State.QUEUED
    slurm.queue(("7", "PENDING", "Priority", token))
    refresh(repository)
    assert attempt.state() is State.QUEUED
    assert attempt.scheduler.jobs["7"].reason == "Priority"
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    assert attempt.state() is State.STARTING
    attempt.write(worker())
    assert attempt.state() is State.RUNNING
    slurm.queue(("7", "FAILED", "NonZeroExitCode", token))
    refresh(repository)
    assert attempt.state() is State.DIED


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        *((state, State.DIED) for state in ("TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")),
        *((state, State.DIED) for state in ("BOOT_FAIL", "DEADLINE", "REVOKED", "COMPLETED")),
        ("CANCELLED", State.CANCELLED),
    ],
)
def test_every_end_that_slurm_knows_is_one(
    slurm: FakeSlurm, repository: Repository, state: str, expected: State
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", state, "None", token))
    refresh(repository)
    assert attempt.scheduler.ended
    assert attempt.state() is expected


@pytest.mark.parametrize(
    "state", ["SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING"]
)
def test_states_that_are_no_end_are_not_taken_for_one(
    slurm: FakeSlurm, repository: Repository, state: str
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", state, "None", token))
    refresh(repository)
    assert attempt.state().alive


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"])
def test_a_job_that_slurm_put_back_is_queued(
    slurm: FakeSlurm, repository: Repository, state: str
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", state, "job requeued in held state", token))
    refresh(repository)
    assert attempt.state() is State.QUEUED


def test_a_job_whose_number_nobody_wrote_down_is_found_by_its_token(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=None)
    slurm.queue(("8", "RUNNING", "None", "somebody-else"), ("9", "RUNNING", "None", token))
    refresh(repository)
    assert attempt.jobs == ["9"]


def test_a_number_that_slurm_used_twice_does_not_deceive(
    slurm: FakeSlurm, repository: Repository
) -> None:
    """After a crash slurmctld may give a lost job's number to another job."""
    attempt, _ = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", "another-token"))
    refresh(repository)
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state() is State.DIED
    assert "vanished" in outcome_of(attempt).what


def test_a_job_that_vanishes_is_given_up_only_after_a_while(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    slurm.queue()
    refresh(repository)
    assert attempt.state().alive, "slurmctld may only have been restarted"
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state() is State.DIED
    outcome = outcome_of(attempt)
    assert "job 7 has vanished" in outcome.what
    assert outcome.try_again


def test_a_job_that_comes_back_has_not_vanished(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue()
    refresh(repository)
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    slurm.queue()
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state().alive, "the clock starts anew"


def test_scontrol_knows_a_job_that_squeue_left_out(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    line = f"JobId=7 JobState=TIMEOUT Reason=TimeLimit NodeList=n1 Comment=lockstep:{token}"
    (slurm.folder / "job-7").write_text(line)
    slurm.queue()
    refresh(repository)
    assert attempt.state() is State.DIED
    assert "time limit of 30 minutes" in outcome_of(attempt).what


def test_accounting_knows_a_job_that_slurmctld_has_forgotten(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, _ = submit(repository, jobs=["7"])
    slurm.queue()
    (slurm.folder / "sacct").write_text("7|OUT_OF_MEMORY|None|n1|0:125|lockstep-sft\n")
    refresh(repository)
    assert attempt.state() is State.DIED
    outcome = outcome_of(attempt)
    assert "ran out of memory" in outcome.what
    assert "raise `memory` (1G)" in outcome.advice
    assert not outcome.try_again


def test_accounting_that_calls_a_lost_job_running_is_not_believed(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, _ = submit(repository, jobs=["7"])
    slurm.queue()
    (slurm.folder / "sacct").write_text("7|RUNNING|None|n1|0:0|lockstep-sft\n")
    refresh(repository)
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state() is State.DIED


def test_cancelled_by_somebody_is_cancelled(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, _ = submit(repository, jobs=["7"])
    slurm.queue()
    (slurm.folder / "sacct").write_text("7|CANCELLED by 1000|None|n1|0:15|lockstep-sft\n")
    refresh(repository)
    assert attempt.state() is State.CANCELLED
    assert "job 7 was cancelled from outside by 1000 (scancel)" in outcome_of(attempt).what


def test_a_job_that_slurm_still_has_is_looked_up_for_who_cancelled_it(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "CANCELLED", "None", token))
    (slurm.folder / "job-7").write_text("JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15\n")
    (slurm.folder / "sacct").write_text("7|CANCELLED by 0|None|n1|0:15|lockstep-sft\n")
    refresh(repository)
    assert "was cancelled from outside by root (scancel)" in outcome_of(attempt).what


def test_a_run_says_who_ended_a_stage_that_it_did_not_cancel(
    slurm: FakeSlurm, repository: Repository, tmp_path: Path
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "CANCELLED", "None", token))
    refresh(repository)
    said = io.StringIO()
    run = PipelineRun(repository, "slurm", load_profile(ROOT, "slurm"), Console(said), -1)
    output = tmp_path / "sft.log"
    output.write_text("sft: cancelled: job 7 was cancelled from outside\n")

    def ended() -> str:
        process = subprocess.Popen(["false"])
        process.wait()
        run.running["sft"] = _Running(process, output, set())
        assert not run._succeeded("sft", 1)
        return said.getvalue()

    assert "sft: FAILED" in ended()
    assert "job 7 was cancelled from outside" in said.getvalue()
    attempt.mark_cancelled()
    assert "sft: cancelled by another command" in ended()


def test_a_link_after_a_failed_one_was_cancelled_by_nobody(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "CANCELLED", "DependencyNeverSatisfied", token))
    refresh(repository)
    assert "a job that it waits for has failed" in outcome_of(attempt).what


def test_a_full_disk_is_called_by_its_name(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "FAILED", "NonZeroExitCode", token))
    refresh(repository)
    assert "exit status" in outcome_of(attempt).what
    log = attempt.folder / "7_0_log.err"
    log.write_text("OSError: [Errno 28] No space left on device: '/scratch/x'\nsrun: error: ...\n")
    assert "No space left on device: '/scratch/x'" in outcome_of(attempt).what
    log.unlink()
    for outcome in (outcome_of, outcome_here, outcome_in_session):
        # The kernel's own answer, in the place where it is asked.
        (attempt.folder / ".room").symlink_to("/dev/full")
        said = outcome(attempt)
        assert f"No space left on device: {attempt.folder}" in said.what
        assert said.advice.startswith("free some space")


def test_no_answer_changes_nothing_and_is_named(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    (slurm.folder / "silent").touch()
    for _ in range(3):
        refresh(repository)
        time.sleep(0.2)
    assert attempt.state().alive
    assert "Unable to contact" in (Scheduler(repository).silence() or "")
    (slurm.folder / "silent").unlink()
    refresh(repository)
    assert Scheduler(repository).silence() is None


def test_one_question_serves_all_jobs_and_all_commands(
    slurm: FakeSlurm, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.slurm.scheduler.SHORTEST_S", 60.0)
    tokens = [submit(repository, stage)[1] for stage in ("sft", "reward_model", "evaluate")]
    slurm.queue(*((str(i), "RUNNING", "None", token) for i, token in enumerate(tokens)))
    for _ in range(20):
        Scheduler(repository).refresh()
    assert slurm.calls("squeue") == 1


def test_questions_become_rarer_while_nothing_changes(
    slurm: FakeSlurm, repository: Repository
) -> None:
    _, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", token))
    intervals = []
    for _ in range(15):
        refresh(repository)
        intervals.append(atomic.load_json(repository.home / "slurm/last_query.json")["interval"])
    assert intervals == sorted(intervals)
    assert intervals[-1] == scheduler.LONGEST_S
    slurm.queue(("7", "COMPLETED", "None", token))
    refresh(repository)
    assert atomic.load_json(repository.home / "slurm/last_query.json")["interval"] < intervals[-1]


def test_nobody_asks_slurm_where_no_job_is_live(slurm: FakeSlurm, repository: Repository) -> None:
    refresh(repository)
    assert slurm.calls("squeue") == 0


def test_an_array_is_over_when_all_its_tasks_are(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7_0", "COMPLETED", "None", token), ("7_1", "RUNNING", "None", token))
    refresh(repository)
    assert attempt.state().alive
    # slurmctld forgets ended tasks one by one.
    slurm.queue(("7_1", "NODE_FAIL", "None", token))
    refresh(repository)
    assert attempt.state() is State.DIED
    assert "lost its node" in outcome_of(attempt).what
    assert sorted(attempt.scheduler.jobs) == ["7_0", "7_1"]


def test_a_site_that_writes_comments_of_its_own_is_survived(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, _ = submit(repository, jobs=["7"])
    row = "7|RUNNING|None|n1|0:05|lockstep-sft|billed to physics\n"
    (slurm.folder / "squeue").write_text(row)
    refresh(repository)
    assert attempt.scheduler.jobs["7"].state == "RUNNING"


def test_a_cancelled_attempt_is_nobodys_any_more(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    attempt.mark_cancelled()
    assert Attempt(attempt.folder).state() is State.CANCELLED


def test_a_submission_that_takes_its_time_has_not_vanished(
    slurm: FakeSlurm, repository: Repository
) -> None:
    """sbatch itself may try for minutes; others look at Slurm meanwhile."""
    attempt, _ = submit(repository)
    token = Scheduler(repository).register(attempt.folder)
    slurm.queue()
    refresh(repository)
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state() is State.QUEUED
    Scheduler(repository).submitted(token, attempt.folder)
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    assert attempt.state() is State.STARTING


def test_the_death_of_one_array_task_is_not_taken_for_anothers(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7_0", "COMPLETED", "None", token), ("7_1", "FAILED", "NonZeroExitCode", token))
    (attempt.folder / "7_0_0_log.err").write_text("srun: error: nodeA: task 0: Terminated\n")
    (attempt.folder / "7_1_0_log.err").write_text(
        "srun: error: nodeA: task 0: Terminated\n"
        "slurmstepd: error: *** JOB 8 ON nodeA CANCELLED AT 2026-01-01 DUE TO JOB REQUEUE ***\n"
        "srun: error: nodeB: task 0: Killed\n"
    )
    refresh(repository)
    outcome = outcome_of(attempt)
    assert "job 7_1: rank 0 on nodeB: Killed" in outcome.what
    assert not outcome.try_again


def test_shards_are_done_one_by_one(repository: Repository) -> None:
    """Process 0 of an array task being done twice does not make its process 1 done."""
    attempt, _ = submit(repository, "rollout")
    order = launch(num_shards=2, resources=Resources(tasks_per_node=2))
    for label, state in enumerate(["done", "running", "done", "done"]):
        report = task_report(TaskState(state), shard=label, num_shards=4)
        files.write(attempt.folder / f"tasks/{label:05}.json", report)
    assert missing_shards(attempt.entry, order) == (0,)
    assert missing_shards(attempt.entry, replace(order, num_shards=3)) == (0, 1, 2)
    assert missing_shards(attempt.entry, replace(order, num_shards=1)) is None


def test_the_log_of_another_task_is_not_looked_at(slurm: FakeSlurm, repository: Repository) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7_0", "COMPLETED", "None", token), ("7_1", "FAILED", "NonZeroExitCode", token))
    (attempt.folder / "7_0_0_log.err").write_text("srun: error: nodeA: task 0: Terminated\n")
    (attempt.folder / "7_1_0_log.err").write_text("srun: error: nodeB: task 0: Killed\n")
    refresh(repository)
    assert "nodeB: Killed" in outcome_of(attempt).what
    assert tail(attempt, outcome_of(attempt)) == "  | srun: error: nodeB: task 0: Killed\n"


def test_a_submission_that_slurm_refused_is_over_soon(
    slurm: FakeSlurm, repository: Repository, tmp_path: Path
) -> None:
    """One of its jobs may have been taken unheard, so it is looked for until that is certain."""
    attempt, _ = submit(repository)
    (slurm.folder / "sbatch-says").write_text("sbatch: error: invalid partition specified\n")
    order = launch(SLURM, clone=tmp_path, code=tmp_path)
    slurm.queue()
    with pytest.raises(LockstepError, match=r"sbatch refused the job.*invalid partition"):
        submit_batches(Scheduler(repository), "sft", attempt.folder, order, pause=just_wait)
    refresh(repository)
    time.sleep(0.4)
    refresh(repository)
    assert attempt.scheduler.ended
    assert not list((repository.home / "slurm/live").iterdir())


def test_a_job_that_slurm_took_unheard_is_cancelled_with_its_submission(
    slurm: FakeSlurm, repository: Repository, tmp_path: Path
) -> None:
    attempt, _ = submit(repository)
    (slurm.folder / "sbatch-says").write_text("sbatch: error: Socket timed out on send/recv\n")

    def told_to_end(_: str) -> None:
        place = next(iter((repository.home / "slurm/live").glob("*.json")))
        slurm.queue(("7", "RUNNING", "None", place.stem))
        raise KeyboardInterrupt

    order = launch(SLURM, clone=tmp_path, code=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        submit_batches(Scheduler(repository), "sft", attempt.folder, order, pause=told_to_end)
    assert "scancel --quiet 7" in (slurm.folder / "calls").read_text()
    refresh(repository)
    assert attempt.jobs == ["7"], "and followed until it is gone"


def test_a_job_vanishes_even_when_the_clock_was_set_back_meanwhile(
    slurm: FakeSlurm, repository: Repository
) -> None:
    attempt, token = submit(repository, jobs=["7"])
    slurm.queue(("7", "RUNNING", "None", token))
    refresh(repository)
    slurm.queue()
    refresh(repository)
    seen = attempt.scheduler
    attempt.write(replace(seen, missing_since=seen.missing_since + 86400))
    refresh(repository)
    assert attempt.state().alive
    time.sleep(0.4)
    refresh(repository)
    assert attempt.state() is State.DIED


def test_a_driver_that_died_before_it_called_sbatch_leaves_nothing_to_wait_for(
    slurm: FakeSlurm,  # noqa: ARG001
    repository: Repository,
) -> None:
    executor = SlurmExecutor(repository)
    attempt, token = submit(repository, jobs=None)
    assert not executor.never_had(attempt), "its job may be on its way: it is found by the token"
    (repository.home / "slurm/live" / f"{token}.json").unlink()
    assert executor.never_had(attempt)
    attempt.write(replace(attempt.launch, submitter=this_process()))
    assert not executor.never_had(attempt), "its driver lives and is about to"


def test_credentials_of_the_control_plane_do_not_reach_sbatch(
    slurm: FakeSlurm, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands its whole environment to the job."""
    for name in ("MLFLOW_TRACKING_TOKEN", "PREFECT_API_KEY", "DVC_STUDIO_TOKEN", "LOCKSTEP_X"):
        monkeypatch.setenv(name, "hush")
    seen = tmp_path / "seen"
    sbatch = f"#!/bin/sh\nenv > {seen}\necho 7\n"
    (slurm.folder / "bin/sbatch").write_text(sbatch)
    attempt, _ = submit(repository)
    order = launch(SLURM, clone=tmp_path, code=tmp_path)
    noted = submit_batches(Scheduler(repository), "sft", attempt.folder, order, pause=just_wait)
    assert noted.jobs == ("7",)
    assert "PATH=" in seen.read_text()
    assert "hush" not in seen.read_text()


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Munge encode failed: Failed to access munge.socket.2",
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ],
)
def test_what_passes_is_waited_out(
    slurm: FakeSlurm, repository: Repository, tmp_path: Path, said: str
) -> None:
    (slurm.folder / "bin/sbatch").write_text(f"#!/bin/sh\necho {shlex.quote(said)} >&2\nexit 1\n")
    attempt, _ = submit(repository)
    told = []

    def wait(line: str) -> None:
        told.append(line)
        (slurm.folder / "bin/sbatch").write_text("#!/bin/sh\necho 7\n")

    order = launch(SLURM, clone=tmp_path, code=tmp_path)
    noted = submit_batches(Scheduler(repository), "sft", attempt.folder, order, pause=wait)
    assert noted.jobs == ("7",)
    assert said.splitlines()[0] in told[0]


def test_where_there_are_no_arrays_a_stage_in_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.slurm.submit.max_array_size", lambda: 0)
    with pytest.raises(LockstepError, match="set `shards` to 1"):
        slurm_batches("rollout", tmp_path, "token", launch(SLURM, shards=(0, 1)))
