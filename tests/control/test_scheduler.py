"""What is made of Slurm's answers. A fake command line gives those that a real one cannot be made
to give at will: jobs that vanish, numbers used twice, accounting that knows better, no answer."""

import io
import os
import shlex
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

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
from pipelines.ledger.launch import Launch
from pipelines.ledger.state import State, TaskState
from pipelines.runs.run import PipelineRun, _Running
from pipelines.runs.status import render, stage_statuses
from pipelines.slurm import scheduler
from pipelines.slurm.outcome import Outcome, outcome_here, outcome_in_session, outcome_of, tail
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
VANISH_S = 0.3


class FakeSlurm:
    """Slurm's commands, answering what the test writes, and a clone that asks them."""

    def __init__(self, root: Path) -> None:
        self.folder, self.repository = root / "fake", Repository(root / "clone")
        self.used = "0:05"
        """How long a job has run, as squeue writes it."""
        (self.folder / "bin").mkdir(parents=True)
        for name in ("squeue", "scontrol", "sacct", "scancel", "sbatch", "srun"):
            self.answers(name, FAKE.format(folder=self.folder))

    @property
    def scheduler(self) -> Scheduler:
        """As of another command: what it knows is on disk."""
        return Scheduler(self.repository)

    def answers(self, command: str, script: str) -> None:
        path = self.folder / "bin" / command
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def say(self, name: str, text: str) -> None:
        """What the fake commands read their answers from."""
        (self.folder / name).write_text(text)

    def queue(self, *jobs: tuple[str, str, str, str]) -> None:
        """What squeue shows: number, state, reason and token of each job."""
        lines = [f"{i}|{s}|{r}|node1|{self.used}|lockstep-sft|lockstep:{t}" for i, s, r, t in jobs]
        self.say("squeue", "".join(line + "\n" for line in lines))

    def refresh(self) -> None:
        self.scheduler.refresh(now=True)

    def submit(self, stage: str = "sft", *jobs: str) -> "Job":
        """An attempt as a driver leaves it, which has noted these numbers of jobs."""
        spec = Spec(stage, stage, None, {}, "c", {}, {"model": "m"}, "metrics.json")
        entry = Ledger(self.repository.jobs).find_or_create(spec, ORIGIN)
        attempt = entry.new_attempt(launch())
        attempt.write(launch(SLURM, resources=Resources(time_minutes=30, memory="1G"), jobs=jobs))
        token = self.scheduler.register(attempt.folder)
        self.scheduler.submitted(token, attempt.folder)
        return Job(self, attempt, token)

    def calls(self, command: str) -> int:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.startswith(command) for line in lines)


@dataclass(frozen=True)
class Job:
    """An attempt, and what Slurm shows of its jobs."""

    slurm: FakeSlurm
    attempt: Attempt
    token: str

    def shown(self, state: str, reason: str = "None") -> State:
        """Its state after Slurm was asked and showed job 7 in a state of Slurm's."""
        return self.shown_tasks(("7", state, reason))

    def shown_tasks(self, *jobs: tuple[str, str, str]) -> State:
        self.slurm.queue(*((*job, self.token) for job in jobs))
        return self.asked()

    def missing(self) -> State:
        """Its state after squeue showed no job."""
        return self.shown_tasks()

    def asked(self) -> State:
        self.slurm.refresh()
        return self.attempt.state()

    def asked_late(self) -> State:
        """Its state after Slurm was asked again, when what is still missing has vanished."""
        time.sleep(VANISH_S + 0.1)
        return self.asked()

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.attempt)

    def submit_again(self, pause: Callable[[str], None] = just_wait) -> Launch:
        """As its driver calls sbatch."""
        folder = self.slurm.folder
        order = launch(SLURM, clone=folder, code=folder)
        return submit_batches(self.slurm.scheduler, "sft", self.attempt.folder, order, pause=pause)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "fake/bin"), os.environ["PATH"]]))
    monkeypatch.setattr(scheduler, "CONFIRM_S", 0.0)
    monkeypatch.setattr(scheduler, "VANISH_S", VANISH_S)
    return fake


@pytest.fixture
def job(slurm: FakeSlurm) -> Job:
    return slurm.submit("sft", "7")


def test_how_long_a_job_has_run_is_by_slurms_clock(slurm: FakeSlurm, job: Job) -> None:
    """Its node's clock is a day behind this host's."""
    (slurm.repository.root / "params.yaml").write_text("seed: 17\n")
    job.attempt.write(worker(time=time.time() - 86400))
    for state, used in (("RUNNING", "4:05"), ("SUSPENDED", "0-00:04:05")):
        slurm.used = used
        job.shown(state)
        [status] = [row for row in stage_statuses(slurm.repository) if row.stage == "sft"]
        assert status.state == state.lower()
        assert "4 min 05 s of 30 min 00 s" in render([status])


def test_a_job_is_followed_from_the_queue_to_its_end(job: Job) -> None:
    assert job.attempt.state() is State.QUEUED
    assert job.shown("PENDING", "Priority") is State.QUEUED
    assert job.attempt.scheduler.jobs["7"].reason == "Priority"
    assert job.shown("RUNNING") is State.STARTING
    job.attempt.write(worker())
    assert job.attempt.state() is State.RUNNING
    assert job.shown("FAILED", "NonZeroExitCode") is State.DIED


STATES = {
    **dict.fromkeys(("TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"), State.DIED),
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "REVOKED", "COMPLETED"), State.DIED),
    "CANCELLED": State.CANCELLED,
    **dict.fromkeys(("COMPLETING", "CONFIGURING", "SIGNALING"), State.STARTING),
    **dict.fromkeys(("STOPPED", "SUSPENDED"), State.SUSPENDED),
    **dict.fromkeys(("REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), State.QUEUED),
}


@pytest.mark.parametrize(("state", "expected"), STATES.items(), ids=STATES)
def test_what_each_of_slurms_states_means(job: Job, state: str, expected: State) -> None:
    assert job.shown(state, "job requeued in held state") is expected
    assert job.attempt.scheduler.ended is (not expected.alive)


def test_an_end_is_believed_late_but_that_of_a_job_that_never_ran(
    slurm: FakeSlurm, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ran may be put back, and then shows an end for a moment."""
    monkeypatch.setattr(scheduler, "CONFIRM_S", 60.0)
    assert job.shown("CANCELLED").alive, "it ran for five seconds"
    slurm.used = "0:00"
    assert job.shown("FAILED").alive
    assert job.shown("CANCELLED") is State.CANCELLED


def test_a_job_whose_number_nobody_wrote_down_is_found_by_its_token(slurm: FakeSlurm) -> None:
    job = slurm.submit("sft")
    slurm.queue(("8", "RUNNING", "None", "somebody-else"), ("9", "RUNNING", "None", job.token))
    slurm.refresh()
    assert job.attempt.jobs == ["9"]


def test_a_number_that_slurm_used_twice_does_not_deceive(slurm: FakeSlurm, job: Job) -> None:
    """After a crash slurmctld may give a lost job's number to another job."""
    slurm.queue(("7", "RUNNING", "None", "another-token"))
    slurm.refresh()
    assert job.asked_late() is State.DIED
    assert "vanished" in job.outcome.what


def test_a_job_that_vanishes_is_given_up_only_after_a_while(job: Job) -> None:
    job.shown("RUNNING")
    assert job.missing().alive, "slurmctld may only have been restarted"
    assert job.asked_late() is State.DIED
    assert "job 7 has vanished" in job.outcome.what
    assert job.outcome.try_again


def test_a_job_that_comes_back_has_not_vanished(slurm: FakeSlurm, job: Job) -> None:
    job.missing()
    job.shown("RUNNING")
    slurm.queue()
    assert job.asked_late().alive, "the clock starts anew"


def test_scontrol_knows_a_job_that_squeue_left_out(slurm: FakeSlurm, job: Job) -> None:
    line = f"JobId=7 JobState=TIMEOUT Reason=TimeLimit NodeList=n1 Comment=lockstep:{job.token}"
    slurm.say("job-7", line)
    assert job.missing() is State.DIED
    assert "time limit of 30 minutes" in job.outcome.what


def test_accounting_knows_a_job_that_slurmctld_has_forgotten(slurm: FakeSlurm, job: Job) -> None:
    slurm.say("sacct", "7|OUT_OF_MEMORY|None|n1|0:125|lockstep-sft\n")
    assert job.missing() is State.DIED
    assert "ran out of memory" in job.outcome.what
    assert "raise `memory` (1G)" in job.outcome.advice
    assert not job.outcome.try_again


def test_accounting_that_calls_a_lost_job_running_is_not_believed(
    slurm: FakeSlurm, job: Job
) -> None:
    slurm.say("sacct", "7|RUNNING|None|n1|0:0|lockstep-sft\n")
    job.missing()
    assert job.asked_late() is State.DIED


def test_cancelled_by_somebody_is_cancelled(slurm: FakeSlurm, job: Job) -> None:
    nobody = 4_000_000_000  # a number that no user of this machine has
    slurm.say("sacct", f"7|CANCELLED by {nobody}|None|n1|0:15|lockstep-sft\n")
    assert job.missing() is State.CANCELLED
    assert f"job 7 was cancelled from outside by {nobody} (scancel)" in job.outcome.what


def test_a_job_that_slurm_still_has_is_looked_up_for_who_cancelled_it(
    slurm: FakeSlurm, job: Job
) -> None:
    slurm.say("job-7", "JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15\n")
    slurm.say("sacct", "7|CANCELLED by 0|None|n1|0:15|lockstep-sft\n")
    job.shown("CANCELLED")
    assert "was cancelled from outside by root (scancel)" in job.outcome.what


def test_a_run_says_who_ended_a_stage_that_it_did_not_cancel(job: Job, tmp_path: Path) -> None:
    job.shown("CANCELLED")
    said = io.StringIO()
    profile = load_profile(ROOT, "slurm")
    run = PipelineRun(job.slurm.repository, "slurm", profile, Console(said), -1)
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
    job.attempt.mark_cancelled()
    assert "sft: cancelled by another command" in ended()


def test_a_link_after_a_failed_one_was_cancelled_by_nobody(job: Job) -> None:
    job.shown("CANCELLED", "DependencyNeverSatisfied")
    assert "a job that it waits for has failed" in job.outcome.what


def test_a_full_disk_is_called_by_its_name(job: Job) -> None:
    job.shown("FAILED", "NonZeroExitCode")
    assert "exit status" in job.outcome.what
    log = job.attempt.folder / "7_0_log.err"
    log.write_text("OSError: [Errno 28] No space left on device: '/scratch/x'\nsrun: error: ...\n")
    assert "No space left on device: '/scratch/x'" in job.outcome.what
    log.unlink()
    for outcome in (outcome_of, outcome_here, outcome_in_session):
        # The kernel's own answer, in the place where it is asked.
        (job.attempt.folder / ".room").symlink_to("/dev/full")
        said = outcome(job.attempt)
        assert f"No space left on device: {job.attempt.folder}" in said.what
        assert said.advice.startswith("free some space")


def test_no_answer_changes_nothing_and_is_named(slurm: FakeSlurm, job: Job) -> None:
    job.shown("RUNNING")
    slurm.say("silent", "")
    for _ in range(3):
        slurm.refresh()
        time.sleep(0.2)
    assert job.attempt.state().alive
    assert "Unable to contact" in (slurm.scheduler.silence() or "")
    (slurm.folder / "silent").unlink()
    slurm.refresh()
    assert slurm.scheduler.silence() is None


def test_one_question_serves_all_jobs_and_all_commands(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.slurm.scheduler.SHORTEST_S", 3600.0)
    jobs = [slurm.submit(stage) for stage in ("sft", "reward_model", "evaluate")]
    slurm.queue(*((str(i), "RUNNING", "None", job.token) for i, job in enumerate(jobs)))
    for _ in range(20):
        slurm.scheduler.refresh()
    assert slurm.calls("squeue") == 1


def test_questions_become_rarer_while_nothing_changes(slurm: FakeSlurm, job: Job) -> None:
    def interval(state: str) -> float:
        job.shown(state)
        asked = atomic.load_json(slurm.repository.home / "slurm/last_query.json")
        return float(asked["interval"])

    intervals = [interval("RUNNING") for _ in range(15)]
    assert intervals == sorted(intervals)
    assert intervals[-1] == scheduler.LONGEST_S
    assert interval("COMPLETED") < intervals[-1]


def test_nobody_asks_slurm_where_no_job_is_live(slurm: FakeSlurm) -> None:
    slurm.refresh()
    assert slurm.calls("squeue") == 0


def test_an_array_is_over_when_all_its_tasks_are(job: Job) -> None:
    assert job.shown_tasks(("7_0", "COMPLETED", "None"), ("7_1", "RUNNING", "None")).alive
    # slurmctld forgets ended tasks one by one.
    assert job.shown_tasks(("7_1", "NODE_FAIL", "None")) is State.DIED
    assert "lost its node" in job.outcome.what
    assert sorted(job.attempt.scheduler.jobs) == ["7_0", "7_1"]


def test_a_site_that_writes_comments_of_its_own_is_survived(slurm: FakeSlurm, job: Job) -> None:
    slurm.say("squeue", "7|RUNNING|None|n1|0:05|lockstep-sft|billed to physics\n")
    slurm.refresh()
    assert job.attempt.scheduler.jobs["7"].state == "RUNNING"


def test_a_cancelled_attempt_is_nobodys_any_more(job: Job) -> None:
    job.shown("RUNNING")
    job.attempt.mark_cancelled()
    assert Attempt(job.attempt.folder).state() is State.CANCELLED


def test_a_submission_that_takes_its_time_has_not_vanished(slurm: FakeSlurm) -> None:
    """sbatch itself may try for minutes; others look at Slurm meanwhile."""
    attempt = slurm.submit("sft").attempt
    job = Job(slurm, attempt, slurm.scheduler.register(attempt.folder))
    job.missing()
    assert job.asked_late() is State.QUEUED
    slurm.scheduler.submitted(job.token, attempt.folder)
    assert job.shown("RUNNING") is State.STARTING


ONE_FAILED = (("7_0", "COMPLETED", "None"), ("7_1", "FAILED", "NonZeroExitCode"))


def test_the_death_of_one_array_task_is_not_taken_for_anothers(job: Job) -> None:
    (job.attempt.folder / "7_0_0_log.err").write_text("srun: error: nodeA: task 0: Terminated\n")
    (job.attempt.folder / "7_1_0_log.err").write_text(
        "srun: error: nodeA: task 0: Terminated\n"
        "slurmstepd: error: *** JOB 8 ON nodeA CANCELLED AT 2026-01-01 DUE TO JOB REQUEUE ***\n"
        "srun: error: nodeB: task 0: Killed\n"
    )
    job.shown_tasks(*ONE_FAILED)
    assert "job 7_1: rank 0 on nodeB: Killed" in job.outcome.what
    assert not job.outcome.try_again


def test_shards_are_done_one_by_one(slurm: FakeSlurm) -> None:
    """Process 0 of an array task being done twice does not make its process 1 done."""
    attempt = slurm.submit("rollout").attempt
    order = launch(num_shards=2, resources=Resources(tasks_per_node=2))
    for label, state in enumerate(["done", "running", "done", "done"]):
        report = task_report(TaskState(state), shard=label, num_shards=4)
        files.write(attempt.folder / f"tasks/{label:05}.json", report)
    assert missing_shards(attempt.entry, order) == (0,)
    assert missing_shards(attempt.entry, replace(order, num_shards=3)) == (0, 1, 2)
    assert missing_shards(attempt.entry, replace(order, num_shards=1)) is None


def test_the_log_of_another_task_is_not_looked_at(job: Job) -> None:
    for name, end in (("7_0", "nodeA: task 0: Terminated"), ("7_1", "nodeB: task 0: Killed")):
        (job.attempt.folder / f"{name}_0_log.err").write_text(f"srun: error: {end}\n")
    job.shown_tasks(*ONE_FAILED)
    assert "nodeB: Killed" in job.outcome.what
    assert tail(job.attempt, job.outcome) == "  | srun: error: nodeB: task 0: Killed\n"


def test_a_submission_that_slurm_refused_is_over_soon(slurm: FakeSlurm) -> None:
    """One of its jobs may have been taken unheard, so it is looked for until that is certain."""
    job = slurm.submit("sft")
    slurm.say("sbatch-says", "sbatch: error: invalid partition specified\n")
    slurm.queue()
    with pytest.raises(LockstepError, match=r"sbatch refused the job.*invalid partition"):
        job.submit_again()
    job.asked()
    job.asked_late()
    assert job.attempt.scheduler.ended
    assert not list((slurm.repository.home / "slurm/live").iterdir())


def test_a_job_that_slurm_took_unheard_is_cancelled_with_its_submission(slurm: FakeSlurm) -> None:
    job = slurm.submit("sft")
    slurm.say("sbatch-says", "sbatch: error: Socket timed out on send/recv\n")

    def told_to_end(_: str) -> None:
        place = next(iter((slurm.repository.home / "slurm/live").glob("*.json")))
        slurm.queue(("7", "RUNNING", "None", place.stem))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.submit_again(told_to_end)
    assert "scancel --quiet 7" in (slurm.folder / "calls").read_text()
    slurm.refresh()
    assert job.attempt.jobs == ["7"], "and followed until it is gone"


def test_a_job_vanishes_even_when_the_clock_was_set_back_meanwhile(job: Job) -> None:
    job.shown("RUNNING")
    job.missing()
    seen = job.attempt.scheduler
    job.attempt.write(replace(seen, missing_since=seen.missing_since + 86400))
    assert job.asked().alive
    assert job.asked_late() is State.DIED


def test_a_driver_that_died_before_it_called_sbatch_leaves_nothing_to_wait_for(
    slurm: FakeSlurm,
) -> None:
    executor, job = SlurmExecutor(slurm.repository), slurm.submit("sft")
    assert not executor.never_had(job.attempt), "its job may be on its way: found by the token"
    (slurm.repository.home / "slurm/live" / f"{job.token}.json").unlink()
    assert executor.never_had(job.attempt)
    job.attempt.write(replace(job.attempt.launch, submitter=this_process()))
    assert not executor.never_had(job.attempt), "its driver lives and is about to"


def test_credentials_of_the_control_plane_do_not_reach_sbatch(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands its whole environment to the job."""
    for name in ("MLFLOW_TRACKING_TOKEN", "PREFECT_API_KEY", "DVC_STUDIO_TOKEN", "LOCKSTEP_X"):
        monkeypatch.setenv(name, "hush")
    seen = slurm.folder / "seen"
    slurm.answers("sbatch", f"#!/bin/sh\nenv > {seen}\necho 7\n")
    assert slurm.submit("sft").submit_again().jobs == ("7",)
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
def test_what_passes_is_waited_out(slurm: FakeSlurm, said: str) -> None:
    slurm.answers("sbatch", f"#!/bin/sh\necho {shlex.quote(said)} >&2\nexit 1\n")
    lines = []

    def wait(line: str) -> None:
        lines.append(line)
        slurm.answers("sbatch", "#!/bin/sh\necho 7\n")

    assert slurm.submit("sft").submit_again(wait).jobs == ("7",)
    assert said.splitlines()[0] in lines[0]


def test_where_there_are_no_arrays_a_stage_in_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.slurm.submit.max_array_size", lambda: 0)
    with pytest.raises(LockstepError, match="set `shards` to 1"):
        slurm_batches("rollout", tmp_path, "token", launch(SLURM, shards=(0, 1)))
