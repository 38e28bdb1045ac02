"""The development cluster itself: it comes up whole from any state, and it preempts."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slurm.conftest import free_ports, let_the_controller_save
from tests.waiting import TIMEOUT_S, until


def submit(cluster: Any, *words: str, command: str = "sleep 3000") -> str:
    script = ("sbatch", "--parsable", "--output=/dev/null", *words, f"--wrap={command}")
    return str(cluster.run(*script).strip())


def state(cluster: Any, job: str) -> str:
    return str(cluster.run("squeue", "-h", "--states=all", "-o", "%T", "-j", job).strip())


def pids(cluster: Any) -> dict[str, int]:
    """The cluster's daemons by pid file, those only that live."""
    files = sorted((cluster.folder / "run").glob("*.pid"))
    named = {file.name: int(file.read_text()) for file in files}
    return {name: pid for name, pid in named.items() if psutil.pid_exists(pid)}


def whole_node(cluster: Any, partition: str) -> tuple[str, ...]:
    return (f"--partition={partition}", f"--nodelist={cluster.layout.names[0]}", "--exclusive")


def test_a_second_up_changes_nothing(cluster: Any) -> None:
    before = pids(cluster)
    assert len(before) == 2 + cluster.layout.nodes
    cluster.up()
    assert pids(cluster) == before


def test_a_job_runs_and_sees_its_fake_gpus(cluster: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    words = ("sbatch", "--wait", "--partition=gpu", "--gpus-per-node=2", "--output=/dev/null")
    cluster.run(*words, f"--wrap=echo $CUDA_VISIBLE_DEVICES > {seen}", timeout=TIMEOUT_S)
    assert seen.read_text() == "0,1\n"


@pytest.mark.slow
def test_up_after_a_crash_of_the_controller_keeps_jobs_and_nodes(cluster: Any) -> None:
    job = submit(cluster)
    until(lambda: state(cluster, job) == "RUNNING", "the job runs")
    let_the_controller_save(cluster)
    before = pids(cluster)
    cluster.kill_controller()
    cluster.up()
    assert state(cluster, job) == "RUNNING"
    changed = {name for name, pid in pids(cluster).items() if before[name] != pid}
    assert changed == {"slurmctld.pid"}


def test_up_brings_a_lost_node_back(cluster: Any) -> None:
    name = cluster.layout.names[0]
    before = pids(cluster)
    cluster.kill_node(name)
    cluster.up()
    changed = {file for file, pid in pids(cluster).items() if before[file] != pid}
    assert changed == {f"slurmd.{name}.pid"}
    cluster.run("srun", "--partition=gpu", f"--nodelist={name}", "true", timeout=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "fate"), [("spot", "PENDING"), ("spot-cancel", "PREEMPTED")])
def test_urgent_work_preempts(cluster: Any, partition: str, fate: str) -> None:
    victim = submit(cluster, *whole_node(cluster, partition))
    until(lambda: state(cluster, victim) == "RUNNING", "the victim runs")
    urgent = submit(cluster, *whole_node(cluster, "urgent"))
    until(lambda: state(cluster, urgent) == "RUNNING", "the urgent job runs")
    assert state(cluster, victim) == fate


@pytest.mark.slow
def test_nothing_preempts_the_gpu_partition(cluster: Any) -> None:
    safe = submit(cluster, *whole_node(cluster, "gpu"))
    until(lambda: state(cluster, safe) == "RUNNING", "the job runs")
    urgent = submit(cluster, *whole_node(cluster, "urgent"))
    time.sleep(5)
    assert (state(cluster, safe), state(cluster, urgent)) == ("RUNNING", "PENDING")


@pytest.mark.slow
def test_down_ends_jobs_and_leaves_no_process(cluster: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ls-"))
    other = type(cluster)(type(cluster.layout)(folder, port=free_ports(), nodes=2))
    neighbours = pids(cluster)
    try:
        other.up()
        job = submit(other, command=f"exec tail -f {folder}/cluster.json")
        until(lambda: state(other, job) == "RUNNING", "the job runs")
    finally:
        other.down()
    lines = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    assert [line for line in lines if str(folder) in line] == []
    assert pids(cluster) == neighbours
    shutil.rmtree(folder)


def test_a_path_too_long_for_a_socket_is_refused(cluster: Any, tmp_path: Path) -> None:
    far = type(cluster)(type(cluster.layout)(tmp_path / ("long" * 30)))
    with pytest.raises(Exception, match="choose a shorter one with --folder"):
        far.up()
