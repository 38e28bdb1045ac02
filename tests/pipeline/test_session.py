"""A session runs stages as their own processes would: same bytes, same answers, whoever dies."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.clones import copy_clone
from pipelines.base.processes import lives
from pipelines.base.repository import Repository
from pipelines.driver.executors import SessionExecutor
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.worker.session import Session, sessions
from tests.conftest import Clone, copy_tree, kill_each
from tests.waiting import ended, failed, succeeded, until, until_said

pytestmark = pytest.mark.slow

COUNTING_STAGE = """
import os
import time

from stages.context import Stopped


def run(config, inputs, out, ctx):
    state = ctx.scratch / "steps"
    steps = getattr(config, ctx.stage).epochs
    done = int(state.read_text()) if state.exists() else 0
    print("began at", done, os.environ.get("LEFT"), os.getcwd())
    os.environ["LEFT"] = "something"
    os.chdir("/")
    hold = ctx.folder.parents[3] / "hold"
    for step in range(done, steps):
        while step == steps - 1 and hold.exists() and not ctx.should_stop():
            time.sleep(0.05)
        if ctx.should_stop() and not HEEDLESS:
            raise Stopped(f"stopped after {step}")
        if step == FAILS_AT:
            raise RuntimeError("it went wrong")
        time.sleep(0.05)
        aside = state.with_suffix(".tmp")
        aside.write_text(str(step + 1))
        os.replace(aside, state)
        ctx.progress(step + 1, steps, loss=1 / (step + 1))
    for path in out.values():
        path.mkdir()
        (path / "done").write_text(f"{steps} steps")
    return {"steps": steps}


HEEDLESS, FAILS_AT = False, -1
"""
EMPTY_STAGE = """
def run(config, inputs, out, ctx):
    for path in out.values():
        path.mkdir()
        (path / "done").write_text("done")
    return {"rows": 1}
"""
STAGES = "sft,reward_model"
LONG, SHORT, HELD = 20_000, 3, 20


@pytest.fixture(scope="module")
def counting_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose training stages count instead of learning, its data prepared."""
    clone = copy_tree(tmp_path_factory.mktemp("counting") / "clone")
    clone.without_tracking()
    clone.set_params(sft__epochs=SHORT, reward_model__epochs=SHORT)
    clone.write_code("stages/prepare.py", EMPTY_STAGE)
    for name in STAGES.split(","):
        clone.write_code(f"stages/{name}.py", COUNTING_STAGE)
    clone.run("dvc", "repro", "prepare")
    clone.commit("prepared")
    return clone.root


@pytest.fixture
def counting(counting_root: Path, tmp_path: Path) -> Iterator[Any]:
    """A copy of it, with a session up."""
    copy_clone(counting_root, tmp_path / "clone")
    clone = Clone(tmp_path / "clone")
    clone.without_tracking()
    # A process that is ready would have to import the code of this clone anew.
    clone.variables["LOCKSTEP_WARM"] = "off"
    clone.run("lockstep", "session", "up", "--stages", STAGES)
    yield clone
    clone.kill_all()


def session_of(clone: Any) -> Session:
    return sessions(Repository(clone.root))[0]


def pid_of(clone: Any) -> int:
    host = session_of(clone).host
    return until(lambda: host.worker, "the session runs").pid


def is_there(pid: int) -> bool:
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def halt(pid: int) -> None:
    """Stop a process, and wait until it has."""
    process = psutil.Process(pid)
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, f"{pid} is stopped")


def attempts(clone: Any, stage: str = "sft") -> list[Attempt]:
    entry = Ledger(Repository(clone.root).jobs).latest(stage).get(stage)
    return entry.attempts() if entry else []


def executors(clone: Any, stage: str = "sft") -> list[str]:
    return [attempt.launched.executor for attempt in attempts(clone, stage)]


def at_work(clone: Any, stage: str = "sft", **params: int) -> tuple[subprocess.Popen[str], Attempt]:
    """The driver of a stage, and its attempt in the middle of its steps."""
    clone.set_params(**(params or {f"{stage}__epochs": LONG}))
    driver = clone.start_forked("dvc", "repro", "--single-item", stage)

    def begun() -> Attempt | None:
        found = attempts(clone, stage)
        return found[-1] if found and list(found[-1].entry.folder.glob("scratch/steps")) else None

    return driver, until(begun, f"{stage} at work", at_work=driver)


def held_at_work(clone: Any) -> tuple[subprocess.Popen[str], Attempt]:
    """The driver of SFT and its attempt, which waits before its last step until it is let go."""
    (clone.root / "hold").touch()
    return at_work(clone, sft__epochs=HELD)


def let_go(clone: Any) -> None:
    (clone.root / "hold").unlink()


def log_of(attempt: Attempt) -> str:
    return "".join(path.read_text() for path in attempt.logs())


def done_by(clone: Any, stage: str = "sft") -> str:
    out = {"sft": "artifacts/policies/sft/model", "reward_model": "artifacts/rewards/reward_model"}
    return (clone.root / out[stage] / "done").read_text()


def test_a_pipeline_in_a_session_ran_there_and_kept_models_in_memory(finished_root: Path) -> None:
    """That its bytes are those of stages in processes of their own: test_default_pipeline.py."""
    clone = SimpleNamespace(root=finished_root)
    stages = {path.name for path in Repository(finished_root).jobs.iterdir()}
    assert len(stages) == 9
    for stage in stages:
        assert executors(clone, stage) == ["session"], stage
    session = session_of(clone)
    assert session.heartbeat.served == 9
    reused = session.heartbeat.reused
    assert reused >= 5, "sft's policy, the reward model, the reference, the new policy"
    assert session.host.result.why == "it was told to end"


def test_a_stage_that_was_left_out_goes_its_usual_way(counting: Any) -> None:
    lock = (counting.root / "dvc.lock").read_text()
    counting.run("dvc", "repro", "--single-item", "--force", "prepare")
    assert executors(counting, "prepare") == ["local"]
    assert (counting.root / "dvc.lock").read_text() == lock


def test_stages_find_a_clean_process_and_a_failed_one_takes_nobody_along(counting: Any) -> None:
    failing = COUNTING_STAGE.replace("FAILS_AT = False, -1", "FAILS_AT = False, 1")
    counting.write_code("stages/sft.py", failing)
    failed = counting.run("dvc", "repro", "--single-item", "sft", check=False)
    assert "failed: RuntimeError: it went wrong" in failed.stdout
    assert "raise RuntimeError" in log_of(attempts(counting)[-1])
    pid = pid_of(counting)
    counting.run("dvc", "repro", "--single-item", "reward_model")
    counting.write_code("stages/sft.py", COUNTING_STAGE)
    counting.run("dvc", "repro", "--single-item", "sft")
    assert (done_by(counting), done_by(counting, "reward_model")) == ("3 steps", "3 steps")
    assert executors(counting) == executors(counting, "reward_model") == ["session"]
    for stage in ("sft", "reward_model"):
        assert f"began at 0 None {counting.root}" in log_of(attempts(counting, stage)[-1]), stage
    assert pid_of(counting) == pid
    assert is_there(pid)


def test_a_stage_runs_with_the_code_it_was_posted_with(counting: Any) -> None:
    counting.run("dvc", "repro", "--single-item", "sft")
    pid = pid_of(counting)
    new = COUNTING_STAGE.replace("{steps} steps", "{steps} new steps")
    counting.write_code("stages/sft.py", new)
    counting.run("dvc", "repro", "--single-item", "sft")
    assert done_by(counting) == "3 new steps"
    assert executors(counting) == ["session"]
    assert attempts(counting)[-1].worker.pid == pid


def test_after_kill_9_of_the_session_its_stage_goes_on_by_itself(counting: Any) -> None:
    driver, _ = held_at_work(counting)
    pid = pid_of(counting)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_there(pid), "the session is gone")
    let_go(counting)
    output = succeeded(driver)
    assert "session main-001 exited without reporting a result" in output
    assert "going on without" in output
    assert executors(counting) == ["session", "local"]
    assert "began at 0" not in log_of(attempts(counting)[-1])
    assert done_by(counting) == "20 steps"
    said = json.loads(counting.run("lockstep", "session", "status", "--json").stdout)
    assert said[0]["state"] == "died"
    counting.run("lockstep", "session", "down")
    assert "main-001: ended" in counting.run("lockstep", "session", "status").stdout


def test_a_session_that_is_stopped_loses_its_stage_to_a_job(counting: Any) -> None:
    """With shorter limits than people get."""
    limits = {"worker/session": "STALE_S = 120.0", "driver/session_watch": "HANG_S = 600.0"}
    for name, value in limits.items():
        path = counting.root / f"pipelines/{name}.py"
        code = path.read_text()
        assert value in code
        path.write_text(code.replace(value, f"{value.split()[0]} = 30.0"))
    driver, _ = held_at_work(counting)
    pid = pid_of(counting)
    halt(pid)
    let_go(counting)
    output = succeeded(driver)
    assert re.search(r"session main-001 hangs: no heartbeat for \d+ s", output)
    assert "session main-001 ended: it hung" in output
    assert executors(counting) == ["session", "local"]
    assert done_by(counting) == "20 steps"
    assert not is_there(pid)


def test_a_driver_that_was_killed_finds_its_stage_in_the_session(counting: Any) -> None:
    driver, _ = held_at_work(counting)
    # What the session has started itself, it waits for when the stage has ended.
    session = psutil.Process(pid_of(counting))
    spared = {session.pid, *(child.pid for child in session.children(recursive=True))}
    killed = [process for process in counting.processes() if process.pid not in spared]
    kill_each(killed)
    ended(driver)
    until(lambda: not any(psutil.pid_exists(p.pid) for p in killed), "processes gone")
    again = counting.start_forked("dvc", "repro", "--single-item", "sft")
    until_said(again, "its job still runs")
    let_go(counting)
    succeeded(again)
    assert executors(counting) == ["session"]
    assert done_by(counting) == "20 steps"


def test_cancelling_a_stage_leaves_the_session_to_the_next(counting: Any) -> None:
    driver, attempt = at_work(counting)
    other = counting.start_forked("dvc", "repro", "--single-item", "reward_model")
    waiting = until(lambda: attempts(counting, "reward_model"), "the second is posted")[-1]
    until(lambda: waiting.state() == "queued", "it waits for the first")
    assert "session main-001: running" in counting.run("lockstep", "status").stdout
    assert "sft: cancelled job main-001" in counting.run("lockstep", "cancel", "sft").stdout
    output = ended(driver)
    assert "cancelled; progress is saved: run the same command to continue" in output
    assert attempt.state() == "cancelled"
    output = succeeded(other)
    assert done_by(counting, "reward_model") == "3 steps"
    assert waiting.result.started >= attempt.result.ended, "one after the other"
    counting.set_params(sft__epochs=SHORT)
    counting.run("dvc", "repro", "--single-item", "sft")
    assert executors(counting) == ["session"]


def test_a_stage_that_does_not_stop_takes_the_session_with_it(
    counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.driver.executors.STOP_S", 1.0)
    heedless = COUNTING_STAGE.replace("HEEDLESS, FAILS_AT = False", "HEEDLESS, FAILS_AT = True")
    counting.write_code("stages/sft.py", heedless)
    driver, attempt = at_work(counting)
    attempt.mark_cancelled()
    assert SessionExecutor(Repository(counting.root)).cancel(attempt)
    assert attempt.state() == "cancelled"
    assert not is_there(pid_of(counting))
    failed(driver)


def test_a_session_that_is_told_to_end_hands_its_stage_on(counting: Any) -> None:
    driver, attempt = held_at_work(counting)
    counting.run("lockstep", "session", "down")
    assert "its session ended" in attempt.result.error
    let_go(counting)
    succeeded(driver)
    assert executors(counting) == ["session", "local"]
    assert done_by(counting) == "20 steps"
    assert session_of(counting).host.result.why == "it was told to end"


def test_an_idle_session_ends_and_one_that_hangs_is_passed_by(counting: Any) -> None:
    again = counting.run("lockstep", "session", "up", check=False).stdout
    assert "session main-001 is up already" in again
    session = session_of(counting)
    until(
        lambda: (beat := session.heartbeat) and beat.doing == "idle",
        "the session is ready",
        at_work=lambda: session.host.state().alive,
    )
    halt(pid_of(counting))
    replace(session.heartbeat, time=time.time() - 1000).write(session.folder)
    output = counting.run("dvc", "repro", "--single-item", "sft").stdout
    assert "session main-001 does not run it: no heartbeat for" in output
    assert executors(counting) == ["local"]
    os.kill(pid_of(counting), signal.SIGKILL)
    until(lambda: not session.host.state().alive, "the session is gone")
    words = ("--stages", "sft", "--idle-minutes", "0.01")
    counting.run("lockstep", "session", "up", *words)
    second = session_of(counting)
    assert second.label == "main-002"
    until(lambda: not second.host.state().alive, "the idle session has ended")
    assert second.host.result.why == "it was idle for 0.01 minutes"


def test_a_session_ends_with_its_clone(counting: Any) -> None:
    pid, session = pid_of(counting), session_of(counting)
    until(
        lambda: (beat := session.heartbeat) and beat.doing == "idle",
        "the session is ready",
        at_work=lambda: session.host.state().alive,
    )
    # At once: a session may write while a folder is deleted file by file.
    counting.root.rename(counting.root.with_name("gone"))
    until(lambda: not is_there(pid), "the session's end")
