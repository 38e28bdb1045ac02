"""However a job dies: seen within seconds, named for what it was, with what to do next."""

from typing import Any

import pytest

from tests.slurm.conftest import STAGE, lose_node
from tests.waiting import failed, stop, succeeded


def test_an_exception_ends_with_its_traceback_and_no_second_try(quick_sft: Any) -> None:
    quick_sft.begin_with("sft", "    raise ValueError('row 17')\n")
    output = failed(quick_sft.start_sft())
    assert "sft: failed: ValueError: row 17" in output
    assert "| ValueError: row 17" in output, "the traceback"
    assert "fix the cause, then run the same command" in output
    assert quick_sft.status()["attempts"] == 1


def test_kill_9_of_the_worker_names_rank_and_node(long_sft: Any) -> None:
    driver, _ = long_sft.start_training(*STAGE)
    long_sft.workers()[0].kill()
    output = failed(driver)
    assert "rank 0 on 127.0.0.1" in output
    assert "Killed" in output
    assert "if nobody killed it, it ran out of memory" in output
    row = long_sft.status()
    assert (row["state"], row["attempts"]) == ("died", 1)
    assert "Killed" in row["error"]


def test_out_of_memory_is_named(long_sft: Any) -> None:
    hoard = "    import time; hoard = bytearray(2 * 10**9); time.sleep(60)\n"
    long_sft.begin_with("sft", hoard)
    output = failed(long_sft.start_driver())
    assert "ran out of memory" in output
    assert "raise `memory`" in output


def test_scancel_is_taken_for_what_it_is(long_sft: Any) -> None:
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scancel", row["job"])
    output = failed(driver)
    assert f"job {row['job']} was cancelled from outside (scancel)" in output
    assert long_sft.status()["state"] == "cancelled"
    assert long_sft.jobs() == []


def test_a_lost_node_is_named_where_no_restart_is_allowed(long_sft: Any) -> None:
    long_sft.set_profile(requeues=0)
    driver, row = long_sft.start_training(*STAGE)
    lose_node(long_sft.cluster, row["nodes"])
    output = failed(driver)
    assert f"lost its node on {row['nodes']}" in output


def test_a_full_partition_shows_why_the_job_waits(long_sft: Any) -> None:
    cluster = long_sft.cluster
    for _ in cluster.layout.names:
        cluster.run("sbatch", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300")
    driver = long_sft.start_driver()
    row = long_sft.until(
        lambda: (r := long_sft.status())["state"] == "queued" and r["reason"] and r, "a reason"
    )
    assert row["reason"] in ("Resources", "Priority")
    stop(driver)
    assert row["job"] not in long_sft.jobs()


def test_a_drained_node_takes_no_job_and_loses_none(medium_sft: Any, undisturbed_lock: str) -> None:
    driver, row = medium_sft.start_training()
    node = f"NodeName={row['nodes']}"
    medium_sft.cluster.run("scontrol", "update", node, "State=DRAIN", "Reason=maintenance")
    medium_sft.release()
    succeeded(driver)
    assert medium_sft.lock() == undisturbed_lock


@pytest.mark.slow
def test_a_held_job_says_how_to_release_it(long_sft: Any) -> None:
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scontrol", "requeuehold", row["job"])
    remedy = f"; scontrol release {row['job']}"
    long_sft.until(
        lambda: (r := long_sft.status())["state"] == "queued" and remedy in r["reason"], "held"
    )
    assert any(remedy in line for line in driver.stdout), "the command that waits says so, too"
    long_sft.cluster.run("scontrol", "release", row["job"])
    long_sft.until(lambda: long_sft.status()["restarts"] == 1, "running again")
    stop(driver)


@pytest.mark.slow
def test_a_time_limit_that_kills_is_named(long_sft: Any) -> None:
    """A stage that does not heed the warning is killed at the limit, which is shortened here."""
    long_sft.set_profile(requeues=0)
    code = (long_sft.root / "stages/sft.py").read_text()
    long_sft.write_code("stages/sft.py", code.replace("if stop:", "if False:"))
    driver, row = long_sft.start_training(*STAGE)
    long_sft.cluster.run("scontrol", "update", f"JobId={row['job']}", "EndTime=now+30")
    output = failed(driver)
    assert f"job {row['job']} passed its time limit" in output
    assert "raise `time_minutes`" in output
