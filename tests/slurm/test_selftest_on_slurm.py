"""A self-test as a job on two nodes of a real cluster, where all is well; and one that is ended."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import copy_tree
from tests.slurm.conftest import on_slurm
from tests.waiting import TIMEOUT_S

COMMAND = ("lockstep", "selftest", "--nodes", "2")


@pytest.fixture(scope="module")
def tested(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A clone after a self-test on two nodes, and what the command said."""
    root = tmp_path_factory.mktemp("selftest") / "clone"
    copy_tree(root)
    clone = on_slurm(root, cluster)
    return clone, clone.run(*COMMAND, "--output", "mine").stdout


@pytest.fixture(scope="module")
def report(tested: tuple[Any, str]) -> Any:
    return json.loads((tested[0].root / ".lockstep/selftest/001/report.json").read_text())


def values(report: Any, check: str) -> list[Any]:
    return [each["values"] for each in report["measured"][check]]


def test_all_is_well_on_two_nodes(tested: tuple[Any, str], report: Any) -> None:
    """Two emulated nodes share two cores and a disk, which may be slow."""
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert set(verdicts.values()) <= {"ok", "slow"}, report["findings"]
    assert (report["nodes"], report["ranks"], report["version"]) == (2, 2, 1)
    machines = report["measured"]["machine"]
    assert [each["node"] for each in machines] == ["127.0.0.11", "127.0.0.12"]
    assert verdicts["versions"] == verdicts["requeue"] == verdicts["clocks"] == "ok"
    assert tested[1].splitlines()[-2].endswith("exit status 0")


def test_collectives_and_disk_are_measured_across_nodes(report: Any) -> None:
    for of_rank in values(report, "collectives"):
        assert of_rank["backend"] == "gloo"
        assert {row["operation"] for row in of_rank["all"]} == {
            *("all-reduce", "all-gather", "broadcast")
        }
        assert all(row["right"] and row["gb_per_s"] > 0 for row in of_rank["all"])
    first, second = (each[".lockstep"] for each in values(report, "disk"))
    assert first["lock"] == second["lock"] == "ok"
    assert second["new_seen_s"] is not None, "seen, however slow the disk is"
    assert first["read_together"] > 0


def test_ranks_train_as_one_and_a_killed_one_is_named_and_replaced(report: Any) -> None:
    alone, together = values(report, "alone")[0], values(report, "together")[0]
    assert len(alone["history"]) == len(together["history"]) == 6
    assert 0 < together["apart"]["weights"] < 0.02 * together["apart"]["moved"]
    survivor, dead = values(report, "killed")
    assert dead["exit_status"] == -signal.SIGKILL
    assert "rank 1 on" in survivor["error"]
    resumed = values(report, "resumed")[0]
    assert resumed["resumed_from"] == 3
    assert resumed["digest"] == together["digest"] != alone["digest"]


def test_the_page_and_the_report_stay_and_what_is_large_goes(tested: tuple[Any, str]) -> None:
    clone, said = tested
    folder = clone.root / ".lockstep/selftest/001"
    page = (folder / "report.txt").read_text()
    assert said.endswith(page)
    assert (clone.root / "mine/report.txt").read_text() == page
    assert not (folder / "checks").exists()
    assert not (folder / "disk").exists()
    assert list(folder.glob("*_log.out"))
    assert "no live job is unwanted" in clone.run("lockstep", "status", "--orphans").stdout
    assert not clone.run("git", "status", "--porcelain", "--", "stages", "code").stdout


def test_the_script_is_that_of_the_profile(tested: tuple[Any, str]) -> None:
    clone, _ = tested
    script = clone.run(*COMMAND, "--dry-run").stdout
    for line in ("job-name=lockstep-selftest", "nodes=2", "partition=cpu", "time=20", "mem=1800M"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --no-requeue" in script
    assert "-m pipelines.selftest.host" in script


def test_ctrl_c_cancels_the_job(tested: tuple[Any, str]) -> None:
    clone, _ = tested
    # It is not over before it is cancelled.
    clone.set_profile(setup=["sleep 3000"])
    command = clone.start(*COMMAND)
    [job] = clone.until(clone.jobs, "a job")
    assert clone.cluster.run("squeue", "-h", "-o", "%j").strip() == "lockstep-selftest"
    assert "no live job is unwanted" in clone.run("lockstep", "status", "--orphans").stdout
    command.send_signal(signal.SIGINT)
    assert command.wait(TIMEOUT_S) == 130
    clone.until(lambda: not clone.jobs(), f"the end of job {job}")
    assert not (Path(clone.root) / ".lockstep/selftest/002/report.json").exists()
