"""A bad node is named, left out, and the stage goes on elsewhere, whoever waits for it.

The cluster's nodes share this machine, so what starts the worker (`container`) spoils the first
one that the job comes to: no file may become larger than 4 MiB there, and a larger write fails as
it does on a broken disk.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from tests.slurm.conftest import SlurmClone, on_slurm, root_of_ranks_that_meet
from tests.slurm.light_stages import DIGESTING_STAGE
from tests.waiting import failed, succeeded

WHY = "it cannot write into the clone: File too large"


def on_each_node(clone: Any, *lines: str) -> str:
    """For `container`: these lines come before the worker, on every node."""
    script = clone.root / "node.sh"
    script.write_text("\n".join([*lines, 'exec "$@"', ""]))
    return f"bash {script}"


def spoiled(clone: Any) -> str:
    first = clone.root / "first-node"
    return on_each_node(
        clone,
        f"[ -e {first} ] || echo $SLURMD_NODENAME > {first}",
        f"[ $SLURMD_NODENAME != $(cat {first}) ] || ulimit -f 4096",
    )


def first_node(clone: Any) -> str:
    return str((clone.root / "first-node").read_text().strip())


def bad_nodes(clone: Any, stage: str = "sft") -> dict[str, str]:
    rows = json.loads(clone.run("lockstep", "status", "--json").stdout)["stages"]
    [row] = [row for row in rows if row["stage"] == stage]
    return {bad["node"]: bad["why"] for bad in row["bad_nodes"]}


def excluded(clone: Any, job: str) -> str:
    words = clone.cluster.run("scontrol", "show", "job", job).split()
    [flag] = [word for word in words if word.startswith("ExcNodeList=")]
    return str(flag)


def test_a_job_that_nobody_waits_for_leaves_a_bad_node(quick_sft: Any) -> None:
    """A link of a chain: its successor, also without what the profile leaves out."""
    last = quick_sft.cluster.layout.names[-1]
    quick_sft.set_profile(requeue=False, sft={"container": spoiled(quick_sft), "exclude": last})
    quick_sft.run("lockstep", "run", "--chain", "sft")
    quick_sft.until(lambda: not quick_sft.jobs(), "the end of the chain")
    row = quick_sft.status()
    assert (row["state"], row["attempts"], row["restarts"]) == ("up to date", 2, 0)
    [(bad, why)] = bad_nodes(quick_sft).items()
    assert (bad, why.startswith(WHY)) == (first_node(quick_sft), True)
    assert row["nodes"] not in (bad, last)
    said = excluded(quick_sft, row["job"])
    assert all(
        node in quick_sft.cluster.run("scontrol", "show", "hostnames", said[12:])
        for node in (bad, last)
    )
    assert f"preflight, node: bad: {bad} ({WHY}" in quick_sft.run("lockstep", "logs", "sft").stdout


def test_the_driver_goes_on_in_a_new_job_where_none_may_start_again(quick_sft: Any) -> None:
    quick_sft.set_profile(requeues=0, sft={"container": spoiled(quick_sft)})
    output = succeeded(quick_sft.start_driver())
    bad = first_node(quick_sft)
    assert f"sft: bad node {bad} ({WHY}" in output
    assert "sft: going on in a new job" in output
    row = quick_sft.status()
    assert (row["attempts"], row["restarts"]) == (2, 0)
    assert row["nodes"] != bad
    assert excluded(quick_sft, row["job"]) == f"ExcNodeList={bad}"
    assert list(bad_nodes(quick_sft)) == [bad]


def test_where_every_node_is_bad_the_stage_fails_and_names_those_it_tried(quick_sft: Any) -> None:
    """By a floor that no disk comes up to; progress is what it was."""
    floors = {"exclude_at_most": 1, "disk_write": 1e6}
    quick_sft.set_profile(requeues=0, sft={"preflight": floors})
    output = failed(quick_sft.start_driver())
    assert "2 bad nodes, and `preflight.exclude_at_most` is 1" in output
    tried = bad_nodes(quick_sft)
    assert len(tried) == 2
    assert all(f"{node} (it writes " in output for node in tried)
    shown = quick_sft.run("lockstep", "status").stdout
    assert all(f"sft: left out bad node {node} (it writes" in shown for node in tried)


def test_a_session_does_not_stay_on_a_bad_node(quick_sft: Any) -> None:
    quick_sft.set_profile(sft={"container": spoiled(quick_sft)})
    quick_sft.run("lockstep", "session", "up", "--stages", "sft")

    def why() -> Any:
        said = quick_sft.run("lockstep", "session", "status", "--json").stdout
        return json.loads(said)[0]["why"]

    ended = quick_sft.until(why, "its end")
    assert f"bad node {first_node(quick_sft)} ({WHY}" in ended


@pytest.mark.slow
def test_waiting_tasks_of_an_array_are_spared_a_bad_node(slurm_clone: Any) -> None:
    """What four tasks compute one after another, and none of them on the node of the first."""
    for stage in ("sft", "rollout"):
        slurm_clone.write_code(f"stages/{stage}.py", DIGESTING_STAGE)
    array = {"shards": 4, "array_parallelism": 1, "container": spoiled(slurm_clone)}
    slurm_clone.set_profile(rollout=array)
    slurm_clone.run("lockstep", "run", "rollout@iter_001")
    assert list(bad_nodes(slurm_clone, "rollout@iter_001")) == [first_node(slurm_clone)]
    attempt = slurm_clone.attempt(stage="rollout@iter_001")
    assert sorted(task.restart for task in attempt.tasks) == [0, 0, 0, 1]
    assert {task.state for task in attempt.tasks} <= {"completed", "done"}


@pytest.fixture(scope="module")
def together_root(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a clone with an SFT stage whose ranks meet at its one step. Read it only."""
    folder = tmp_path_factory.mktemp("together")
    return root_of_ranks_that_meet(prepared_root, folder, epochs=1)


@pytest.mark.slow
def test_a_node_that_has_no_part_in_collectives_is_left_out(
    together_root: Path, tmp_path: Path, cluster: Any
) -> None:
    """Its ranks are told of a network that there is not; the other node's are fine."""
    copy_clone(together_root, tmp_path / "clone")
    clone: SlurmClone = on_slurm(tmp_path / "clone", cluster)
    bad = cluster.layout.names[1]
    told = f"[ $SLURMD_NODENAME != {bad} ] || export GLOO_SOCKET_IFNAME=nothing0"
    clone.set_profile(sft={"nodes": 2, "container": on_each_node(clone, told)})
    try:
        output = succeeded(clone.start_driver())
        assert f"sft: bad node {bad} (it fails in collectives" in output
        assert list(bad_nodes(clone)) == [bad]
        row = clone.status()
        assert (row["attempts"], row["restarts"]) == (1, 1)
        measured = json.loads(
            (clone.attempt().folder / "preflight/001/links-00000.json").read_text()
        )["measured"]
        assert all(rate > 0 for rate in measured["between"].values())
        assert len(measured["clocks"]) == 2
    finally:
        clone.kill_all()
