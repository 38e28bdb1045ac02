"""Nobody on the login node: the whole plan in the queue, and its results recorded afterwards."""

import json
import signal
from typing import Any

import pytest

from tests.slurm.conftest import STAGE, STAGES, copy_at_home
from tests.slurm.light_stages import COUNTING_STAGE, DIGESTING_STAGE
from tests.slurm.test_requeue import preempt
from tests.waiting import ended, stop, succeeded


def states(clone: Any) -> dict[str, str]:
    rows = json.loads(clone.run("lockstep", "status", "--json").stdout)["stages"]
    return {row["stage"]: row["state"] for row in rows}


def drain(cluster: Any) -> None:
    """No node takes a job, until the cluster is brought up again."""
    for name in cluster.layout.names:
        cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")


@pytest.mark.slow
def test_a_chain_runs_by_itself_and_records_the_same_bytes(slurm_clone: Any) -> None:
    """With stages that digest what they are given: one wrong input makes other bytes.

    Requeueing is forbidden; Slurm ends the first stage by preemption, and then at its time limit.
    """
    for stage in STAGES:
        slurm_clone.write_code(f"stages/{stage}.py", DIGESTING_STAGE)
    slurm_clone.write_code("stages/sft.py", COUNTING_STAGE)
    slurm_clone.set_params(sft__epochs=60)
    slurm_clone.set_profile(requeue=False, sft={"partition": "spot", "checkpoint_seconds": 0.2})
    slurm_clone.commit("digests")
    at_home = copy_at_home(slurm_clone.root, slurm_clone.root.parent / "home")
    at_home.run("lockstep", "run")
    slurm_clone.hold()
    output = slurm_clone.run("lockstep", "run", "--chain").stdout
    assert "8 stages in the queue" in output
    row = slurm_clone.training()
    urgent = preempt(slurm_clone, row["nodes"])
    again = slurm_clone.until(
        lambda: (r := slurm_clone.status())["attempts"] == 2 and r["progress"] and r, "going on"
    )
    slurm_clone.cluster.run("scancel", urgent)
    assert (again["restarts"], again["job"] != row["job"]) == (1, True)
    slurm_clone.cluster.run("scontrol", "update", f"JobId={again['job']}", "EndTime=now+1")
    slurm_clone.until(lambda: slurm_clone.status()["attempts"] == 3, "going on again")
    waiting = states(slurm_clone)
    assert waiting["report"] == "queued"
    # What is edited now is none of the chain's business.
    slurm_clone.set_params(sft__learning_rate=0.123)
    slurm_clone.release()
    slurm_clone.until(lambda: not slurm_clone.jobs(), "the end of the chain")
    assert "queued" not in states(slurm_clone).values()
    slurm_clone.run("git", "checkout", "-q", "params.yaml")
    output = slurm_clone.run("lockstep", "record").stdout
    assert "9 of 9 stages are up to date" in output
    assert slurm_clone.lock() == (at_home.root / "dvc.lock").read_text()
    assert slurm_clone.steps() == list(range(1, 61)), "each step once"
    logs = slurm_clone.run("lockstep", "logs", "sft").stdout
    assert all(f"sft: attempt {number}, on" in logs for number in (1, 2, 3))
    bill = json.loads(slurm_clone.run("lockstep", "cost", "--stage", "sft", "--json").stdout)
    assert bill["total"]["attempts"] == 3


@pytest.mark.slow
def test_the_last_job_records_what_the_chain_made(quick_sft: Any) -> None:
    quick_sft.run("lockstep", "run", "--chain", "sft")
    quick_sft.until(lambda: not quick_sft.jobs(), "the end of the chain")
    assert "sft:" in quick_sft.lock()
    assert quick_sft.status()["state"] == "up to date"
    assert "nothing to do" in quick_sft.run("lockstep", "run", "sft").stdout


def test_a_failed_link_takes_those_after_it_out_of_the_queue(quick_sft: Any) -> None:
    quick_sft.begin_with("sft", "    raise ValueError('broken')\n")
    quick_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    quick_sft.until(lambda: not quick_sft.jobs(), "nothing pends for ever")
    after = states(quick_sft)
    assert after["sft"] == "failed"
    assert after["rollout@iter_001"] == "cancelled"
    assert "ValueError: broken" in quick_sft.run("lockstep", "logs", "sft").stdout
    done = quick_sft.run("lockstep", "run", "sft", check=False)
    assert "ValueError: broken" in done.stdout, "the next command goes on from there"


def test_a_command_waits_for_a_stage_that_a_chain_has_in_the_queue(quick_sft: Any) -> None:
    cluster = quick_sft.cluster
    drain(cluster)
    quick_sft.run("lockstep", "run", "--chain", "sft")
    again = quick_sft.run("lockstep", "run", "--chain", "sft", check=False)
    assert "jobs of sft are live already" in again.stdout
    assert (
        "a chain has its job in the queue"
        in quick_sft.run("lockstep", "run", "--detach", "sft").stdout
    )
    driver = quick_sft.start_sft()
    waits = next((line for line in driver.stdout if "of chain" in line), None)
    assert waits is not None, "the driver says that it waits for the chain's job"
    cluster.up()
    succeeded(driver)
    assert quick_sft.status()["attempts"] == 1


def test_cancel_takes_dependents_along(long_sft: Any) -> None:
    long_sft.run("lockstep", "run", "--chain", "rollout@iter_001")
    row = long_sft.training()
    # A job that may requeue itself does, beside a successor that goes on waiting.
    long_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    long_sft.until(lambda: long_sft.status()["restarts"] == 1, "a restart")
    assert long_sft.training()["job"] == row["job"]
    waiting = long_sft.cluster.run("squeue", "-h", "-o", "%E").split()
    assert [f"afternotok:{row['job']}(" in each for each in waiting].count(True) == 1
    output = long_sft.run("lockstep", "cancel", "sft").stdout
    assert "sft: cancelled job" in output
    assert "rollout@iter_001: cancelled job" in output
    left = set(long_sft.cluster.run("squeue", "-h", "-o", "%j").split())
    assert left <= {"lockstep-record"}, "its successor is gone as well"
    long_sft.until(lambda: not long_sft.jobs(), "an empty queue")


def test_chains_need_slurm(slurm_clone: Any) -> None:
    done = slurm_clone.run("lockstep", "run", "--chain", LOCKSTEP_PROFILE="local", check=False)
    assert done.returncode == 2
    assert "--chain needs Slurm" in done.stdout


def test_status_shows_all_that_slurm_users_look_for(long_sft: Any) -> None:
    long_sft.set_profile(partition="gpu", gpus_per_node=1)
    driver, row = long_sft.start_training(*STAGE)
    shown = long_sft.run("lockstep", "status").stdout
    line = next(line for line in shown.splitlines() if line.startswith("sft "))
    for part in ("running", "of 30 min 00 s", row["nodes"], row["job"], "loss 1"):
        assert part in line
    assert f"sft: log {row['log']}" in shown
    assert row["gpus"] == 1
    assert row["limit"] == 1800
    stop(driver)


def test_orphans_are_listed_and_ended(long_sft: Any) -> None:
    driver, first = long_sft.start_training(*STAGE)
    stop(driver, signal.SIGHUP)
    assert "no live job is unwanted" in long_sft.run("lockstep", "status", "--orphans").stdout
    long_sft.set_params(sft__epochs=19_999)
    long_sft.run("lockstep", "run", "--detach", "sft")
    shown = long_sft.run("lockstep", "status", "--orphans", "--json").stdout
    assert [orphan["job"] for orphan in json.loads(shown)] == [first["job"]]
    long_sft.run("lockstep", "cancel", "--orphans")
    long_sft.until(lambda: first["job"] not in long_sft.jobs(), "the orphan's end")
    assert long_sft.status()["state"] in ("queued", "starting", "running"), "the other goes on"


def test_logs_follow_across_attempts(long_sft: Any) -> None:
    driver, row = long_sft.start_training(*STAGE)
    follower = long_sft.start("lockstep", "logs", "-f", "sft")
    long_sft.cluster.run("scancel", "--signal=USR2", row["job"])
    long_sft.until(lambda: long_sft.status()["restarts"] == 1, "a restart")
    long_sft.until(
        lambda: "restart 1, on" in long_sft.run("lockstep", "logs", "sft").stdout, "at work"
    )
    stop(driver)
    output = ended(follower)
    assert "attempt 1, on" in output
    assert "attempt 1, restart 1, on" in output
    assert "stopped at a step boundary, to go on after a restart" in output


def test_a_link_that_never_reaches_its_stage_is_named(slurm_clone: Any) -> None:
    slurm_clone.set_profile(setup=["no-such-command"])
    slurm_clone.run("lockstep", "run", "--chain", "sft")
    slurm_clone.until(lambda: not slurm_clone.jobs(), "the end of the chain")
    row = slurm_clone.until_state("died")
    assert "exit status 127" in row["error"]
    assert "no-such-command: command not found" in slurm_clone.run("lockstep", "logs", "sft").stdout
