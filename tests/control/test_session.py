"""Who has a posted attempt, whether its session lives, and which stages a session can serve."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipelines.base import processes
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.processes import ProcessMark, this_process
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind, Profile, Resources, load_profile
from pipelines.driver.session_watch import HANG_S, SessionWatch
from pipelines.ledger import mailbox
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.task import Task
from pipelines.runs.sessions import choose_resources
from pipelines.slurm.outcome import outcome_in_session
from pipelines.slurm.restarts import stop_or_requeue
from pipelines.worker.session import STALE_S, Heartbeat, Session, new_session, serving, sessions
from pipelines.worker.session_host import memory_to_keep
from tests.clock import Clock
from tests.ledger_values import launch, result, worker
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
NOBODY = ProcessMark(2**22 + 1, "never", os.uname().nodename)
CODE = Path("code")


@pytest.fixture
def session(repository: Repository) -> Session:
    """One whose process has begun; whether it lives is up to who holds its lock."""
    session = new_session(repository, "main", launch(stages=("sft",), idle_minutes=1.0))
    session.host.write(worker())
    return session


@pytest.fixture
def attempt(entry: Entry, session: Session) -> Attempt:
    attempt = entry.new_attempt(launch(ExecutorKind.SESSION, session=session.folder))
    attempt.write(replace(attempt.launched, submitter=NOBODY))
    return attempt


def test_the_state_of_a_posted_attempt_is_read_off_the_mailbox_and_the_session(
    session: Session, attempt: Attempt
) -> None:
    with hold_lock(session.folder / "alive"):
        assert attempt.state() == "died", "whoever was to post it is gone"
        assert attempt.never_started
        mailbox.post(session.folder, attempt.folder, CODE)
        assert attempt.state() == "queued"
        assert [post.attempt for post in mailbox.waiting(session.folder)] == [attempt.folder]
        assert mailbox.take(session.folder, attempt.folder)
        assert attempt.state() == "starting"
        attempt.write(worker(time=2.0))
        assert attempt.state() == "running"
    assert attempt.state() == "died", "its session is gone"
    assert not attempt.never_started
    attempt.write(result())
    assert attempt.state() == "completed", "whatever became of the session later"


def test_a_post_is_taken_or_withdrawn_never_both(session: Session, attempt: Attempt) -> None:
    mailbox.post(session.folder, attempt.folder, CODE)
    assert mailbox.withdraw(session.folder, attempt.folder)
    assert not mailbox.take(session.folder, attempt.folder)
    mailbox.post(session.folder, attempt.folder, CODE)
    assert mailbox.take(session.folder, attempt.folder)
    assert not mailbox.withdraw(session.folder, attempt.folder)
    assert mailbox.waiting(session.folder) == []


@pytest.mark.parametrize("submitter", [NOBODY, this_process()], ids=["is gone", "lives"])
def test_a_withdrawn_attempt_is_cancelled(
    session: Session, attempt: Attempt, submitter: ProcessMark
) -> None:
    """Also while the driver that posted it waits for its end, or it would wait for ever."""
    attempt.write(replace(attempt.launched, submitter=submitter))
    with hold_lock(session.folder / "alive"):
        mailbox.post(session.folder, attempt.folder, CODE)
        attempt.mark_cancelled()
        mailbox.withdraw(session.folder, attempt.folder)
        assert attempt.state() == "cancelled"


def test_an_attempt_goes_on_elsewhere_unless_it_was_cancelled(attempt: Attempt) -> None:
    stopped = stop_or_requeue(attempt, Task())
    assert (stopped.state, stopped.retryable) == ("failed", True)
    attempt.write(stopped)
    assert outcome_in_session(attempt).try_again
    attempt.write(replace(stopped, retryable=False))
    assert not outcome_in_session(attempt).try_again
    attempt.mark_cancelled()
    assert stop_or_requeue(attempt, Task()).state == "cancelled"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hands = Clock()
    monkeypatch.setattr("pipelines.driver.session_watch.time", SimpleNamespace(monotonic=hands))
    return hands


def beat(session: Session, when: float) -> None:
    Heartbeat(when).write(session.folder)


def test_what_waits_in_a_session_that_hangs_is_taken_back(
    repository: Repository, session: Session, attempt: Attempt, clock: Clock
) -> None:
    said: list[str] = []
    with hold_lock(session.folder / "alive"):
        mailbox.post(session.folder, attempt.folder, CODE)
        watch = SessionWatch(repository, attempt, said.append)
        for when in (3.0, 9e12):  # whatever the clock of its machine says
            beat(session, when)
            watch.check()
            clock.now += STALE_S - 1
            watch.check()
        assert said == []
        assert attempt.state() == "queued"
        clock.now += 2
        watch.check()
        [line] = said
        assert line.endswith("hangs: no heartbeat for 121 s; taking the stage back")
        assert attempt.never_started, "so that its driver submits it again"
        assert found(repository) is None, "and not to this one"


@pytest.fixture
def stopped_process(session: Session) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, the session's; it holds the lock of one that lives."""
    lock = session.folder / "alive"
    with subprocess.Popen(["flock", str(lock), "sleep", "600"], start_new_session=True) as process:
        until(lambda: is_locked(lock), "the process holds the lock")
        session.host.write(worker(pid=process.pid, host=os.uname().nodename))
        for child in psutil.Process(process.pid).children():
            child.suspend()
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_a_stage_is_taken_from_a_session_that_hangs_with_its_process(
    repository: Repository,
    session: Session,
    attempt: Attempt,
    clock: Clock,
    stopped_process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes.end_processes, "__defaults__", (0.1,))
    said: list[str] = []
    mailbox.post(session.folder, attempt.folder, CODE)
    mailbox.take(session.folder, attempt.folder)
    attempt.write(worker(time=2.0))
    watch = SessionWatch(repository, attempt, said.append)
    for _ in range(4):
        clock.now += HANG_S / 4 - 1
        watch.check()
    assert said == [
        "session main-001 hangs: no heartbeat for 149 s; ending it if that lasts for 600 s"
    ]
    assert attempt.state() == "running"
    clock.now += 5
    watch.check()
    assert stopped_process.wait() == -signal.SIGKILL
    assert attempt.state() == "died"
    outcome = outcome_in_session(attempt)
    assert "ended: it hung: no heartbeat for 601 s" in outcome.what
    assert outcome.try_again, "in a job"


def found(
    repository: Repository, stage: str = "sft", said: list[str] | None = None, **changes: Any
) -> Session | None:
    resources = Resources(**changes.pop("resources", {}))
    said = [] if said is None else said
    return serving(repository, stage, launch(resources=resources, **changes), said.append)


def test_a_session_serves_its_stages_of_its_profile(
    repository: Repository, session: Session
) -> None:
    with hold_lock(session.folder / "alive"):
        assert found(repository) == session
        said: list[str] = []
        assert found(repository, "evaluate", said) is None
        assert found(repository, said=said, profile="other") is None
        assert found(repository, said=said, executor=ExecutorKind.DEBUG) is None
        assert said == [], "nobody has asked for it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_shards": 2}, "shared out to 2 jobs"),
        ({"resources": {"cpus_per_task": 2}}, "`cpus_per_task` is 2, the session's 1"),
        ({"resources": {"device": "cuda"}}, "`device` is cuda"),
        ({"resources": {"gpus_per_node": 1}}, "wants 1 GPUs"),
        ({"resources": {"tasks_per_node": 2}}, "several processes"),
        ({"resources": {"setup": ["module load x"]}}, "`setup`"),
    ],
)
def test_a_stage_that_wants_another_process_goes_its_usual_way(
    repository: Repository, session: Session, changes: dict[str, Any], reason: str
) -> None:
    said: list[str] = []
    with hold_lock(session.folder / "alive"):
        assert found(repository, said=said, **changes) is None
    assert len(said) == 1
    assert reason in said[0]
    assert "going on without" in said[0]


def test_a_session_that_died_hangs_or_ends_gets_no_posts(
    repository: Repository, session: Session
) -> None:
    said: list[str] = []
    assert found(repository, said=said) is None
    with hold_lock(session.folder / "alive"):
        beat(session, worker().time - STALE_S)
        assert found(repository, said=said) is None
        (session.folder / "heartbeat.json").unlink()
        session.request_end()
        assert found(repository, said=said) is None
    assert [line.split(": ")[1].split(" for ")[0] for line in said] == [
        "it died; going on without",
        "no heartbeat",
        "it was told to end; going on without",
    ]
    session.note_end("it was idle")
    assert found(repository, said=said) is None
    assert len(said) == 3, "one that ended as it should is nothing to speak of"


def test_the_newest_start_is_the_session(repository: Repository, session: Session) -> None:
    again = new_session(repository, "main", session.launch)
    other = new_session(repository, "other", session.launch)
    assert again.label == "main-002"
    assert sessions(repository) == [again, other]


def test_a_session_gets_what_the_neediest_of_its_stages_gets() -> None:
    profile = load_profile(ROOT, "slurm-dev")
    resources, left_out = choose_resources(profile, ["rollout", "policy_update"])
    assert left_out == {"rollout": "its work is shared out to 2 jobs (shards)"}
    assert resources == profile.resources("policy_update")
    needy = {"policy_update": {"gpus_per_node": 2}, "score": {"cpus_per_task": 4}}
    mixed = Profile.model_validate({"executor": "local", "stages": needy})
    resources, left_out = choose_resources(mixed, ["rollout", "score", "policy_update"])
    assert resources.gpus_per_node == 2
    assert list(left_out) == ["score"]
    with pytest.raises(LockstepError, match="stages are prepare"):
        choose_resources(mixed, ["nothing"])
    short = {
        "rollout": {"memory": "16000", "time_minutes": 240},
        "policy_update": {"memory": "64G"},
    }
    wide = Profile.model_validate(
        {"executor": "slurm", "defaults": {"time_minutes": 60, "memory": "1G"}, "stages": short}
    )
    resources, left_out = choose_resources(wide, ["rollout", "score", "policy_update"])
    assert (resources.time_minutes, resources.memory, left_out) == (240, "64G", {})
    for no_limit in ("0", None):
        free = wide.model_copy(update={"defaults": Resources(memory=no_limit)})
        assert choose_resources(free, ["rollout", "score"])[0].memory == no_limit


@pytest.mark.parametrize(
    ("memory", "device", "kept"),
    [
        ("64G", "cpu", 16 << 30),
        ("1800", "cpu", 450 << 20),
        (None, "cpu", None),
        ("64G", "cuda", None),
    ],
)
def test_what_is_kept_fits_the_memory_of_the_job(
    memory: str | None, device: str, kept: int | None
) -> None:
    assert memory_to_keep(Resources(memory=memory, device=device)) == kept


def test_no_profile_is_a_session(tmp_path: Path) -> None:
    (tmp_path / "slurm_profiles").mkdir()
    (tmp_path / "slurm_profiles/mine.yaml").write_text("executor: session\n")
    with pytest.raises(LockstepError, match="lockstep session up --profile mine"):
        load_profile(tmp_path, "mine")
