"""The flow over a tiny DVC project, with a real Prefect server behind it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect_servers import LocalServers, send_what_waits
from tiny_project import TinyProject

from pipelines.runs import flow
from pipelines.runs.flow import pipeline

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "RETRY_DELAYS_S", [0.1, 0.1])


def run_flow(profile: str | None = None, targets: list[str] | None = None) -> State:
    return pipeline(profile=profile, targets=targets, return_state=True)


def identity(state: State) -> str:
    return str(state.state_details.flow_run_id)


def test_stages_that_do_not_wait_for_one_another_run_at_the_same_time(project: TinyProject) -> None:
    project.behave(b={"waits_for": "c"}, c={"waits_for": "b"})
    state = run_flow()
    assert state.is_completed()
    assert state.message == "4 stages done, 0 were up to date"
    assert project.overlap("b", "c")
    assert project.started()[0] == "a"
    assert project.started()[3] == "d"


def test_the_profile_says_how_many_run_at_once(project: TinyProject) -> None:
    project.behave(b={"seconds": 1.5}, c={"seconds": 1.5})
    assert run_flow(profile="serial").is_completed()
    assert not project.overlap("b", "c")


def test_what_is_up_to_date_does_not_run_again(
    project: TinyProject, local_servers: LocalServers
) -> None:
    assert run_flow().is_completed()
    state = run_flow()
    assert state.is_completed()
    assert state.message == "all 4 stages are up to date"
    send_what_waits()
    assert local_servers.task_states(identity(state)) == {}
    assert len(project.started()) == 4


def test_a_change_runs_the_stage_it_concerns_and_those_after_it(
    project: TinyProject, local_servers: LocalServers
) -> None:
    assert run_flow().is_completed()
    (project.root / "input_of_c").write_text("2")
    state = run_flow()
    assert state.message == "2 stages done, 2 were up to date"
    local_servers.until_tasks(identity(state), {"c": "Completed", "d": "Completed"})
    # c wrote the same bytes again, so DVC left d alone.
    assert project.started()[4:] == ["c"]


def test_targets_bring_along_only_what_they_need(project: TinyProject) -> None:
    assert run_flow(targets=["b"]).is_completed()
    assert project.started() == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"targets": ["bb"]}, "no stage 'bb'; it has a, b, c, d"),
        ({"profile": "serail"}, "did you mean 'serial'?"),
    ],
    ids=["target", "profile"],
)
def test_what_is_unknown_is_named(project: TinyProject, options: Any, error: str) -> None:
    state = run_flow(**options)
    assert state.is_failed()
    assert error in (state.message or "")
    assert project.started() == []


def test_after_a_failure_other_branches_finish_and_later_stages_do_not_run(
    project: TinyProject, local_servers: LocalServers
) -> None:
    project.behave(b={"failures": 1}, c={"seconds": 2})
    report = project.root / "artifacts/report/summary.md"
    report.parent.mkdir(parents=True)
    report.write_text("# It learned")
    state = run_flow()
    assert state.is_failed()
    assert state.message == "failed: b; not run after that: d; 2 stages done"
    ends = {"a": "Completed", "b": "Failed", "c": "Completed", "d": "Cancelled"}
    runs = local_servers.until_tasks(identity(state), ends)
    assert "b cannot go on" in runs["b"]["state"]["message"]
    assert runs["d"]["state"]["message"] == "not run, after the end of b"
    local_servers.until_logged(identity(state), "this is c")
    errors = local_servers.errors(identity(state))
    assert [line for line in errors if line.startswith("b failed: ")]
    assert not [line for line in errors if runs["b"]["id"] in line]
    body = {"artifacts": {"flow_run_id": {"any_": [identity(state)]}}}
    (artifact,) = local_servers.post("/artifacts/filter", body)
    assert artifact["key"] == "report"
    assert "# It learned" in artifact["data"]
    assert f"{report.with_name('index.html')}" in artifact["data"]
    # Nothing says that another try could help, so there was none.
    assert project.started().count("b") == 1
    # The same again goes on from there.
    assert run_flow().message == "2 stages done, 2 were up to date"


@pytest.mark.parametrize(
    ("result", "tries"),
    [
        ({"retryable": True, "error": "OSError: no space"}, 2),
        (None, 2),
        ({"retryable": False, "error": "a row has no prompt"}, 1),
    ],
    ids=["retryable", "died", "not-retryable"],
)
def test_only_what_is_worth_it_is_tried_again(
    project: TinyProject, result: dict[str, object] | None, tries: int
) -> None:
    project.behave(a={"failures": 1, "ledger": result})
    assert run_flow(targets=["a"]).is_completed() == (tries == 2)
    assert project.started() == ["a"] * tries


def test_retries_come_to_an_end_and_an_older_failure_causes_none(project: TinyProject) -> None:
    project.behave(a={"failures": 9, "ledger": {"retryable": True}})
    assert run_flow(targets=["a"]).is_failed()
    assert project.started() == ["a"] * 3
    # The failure that is in the ledger now causes no retry of another one.
    project.behave(a={"failures": 9})
    assert run_flow(targets=["a"]).is_failed()
    assert project.started() == ["a"] * 4


def test_stages_know_their_invocation_and_profile_and_nothing_of_prefect(
    project: TinyProject, local_servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT__CONTROL_TOKEN", "for-the-flow-alone")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", local_servers.password)
    assert run_flow(profile="serial", targets=["b"]).is_completed()
    first, second = project.events("start")
    assert first["environment"]["LOCKSTEP_PROFILE"] == "serial"
    invocation = first["environment"]["LOCKSTEP_INVOCATION"]
    assert invocation == second["environment"]["LOCKSTEP_INVOCATION"]
    assert "prefect " in invocation
    assert first["flow_variables"] == []


def test_secrets_do_not_reach_prefect(
    project: TinyProject, local_servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "planted-secret")
    project.behave(a={"says": "I was given planted-secret today", "failures": 1})
    state = run_flow(targets=["a"])
    runs = local_servers.until_tasks(identity(state), {"a": "Failed"})
    message = runs["a"]["state"]["message"]
    assert "I was given *** today" in message
    logs = local_servers.until_logged(identity(state), "I was given *** today")
    assert "planted-secret" not in logs + message


def test_a_second_pipeline_in_the_clone_is_refused(project: TinyProject) -> None:
    script = (
        "import sys, time\n"
        "from pipelines.runs.exclusive import only_pipeline\n"
        "from pipelines.base.repository import Repository\n"
        "with only_pipeline(Repository.find(), 'lockstep run sft'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(project.root)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        state = run_flow()
        holder.communicate(b"")
    assert state.is_failed()
    assert "another pipeline runs in this clone: lockstep run sft" in (state.message or "")
    assert str(holder.pid) in (state.message or "")
    assert project.started() == []
    assert run_flow().is_completed()


def test_the_flow_leaves_nothing_behind_in_the_clone(project: TinyProject) -> None:
    assert run_flow(targets=["a"]).is_completed()
    assert not (project.root / ".lockstep/run.json").exists()
    kept = {"run.lock", "runs", "tracking", "dvc.lock.whole", "dvc_hosts.json", "warm", "code"}
    kept |= {"hashes.json"}
    assert {path.name for path in Path(".lockstep").iterdir()} <= kept
