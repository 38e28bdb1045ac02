"""Which nodes are bad, and what a job does about it: by real files and processes of this machine.

nvidia-smi is a stand-in that prints what a real one has printed: no GPU here has errors, is in use
by others or runs too hot when a test wants it. Jobs that leave a node are in tests/slurm.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.preflight import Preflight
from pipelines.config.profiles import Resources, load_profile
from pipelines.driver.activity import why_it_waits
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.preflight import BadNode, NodeReport, report_path
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import TaskState
from pipelines.ledger.task import Task
from pipelines.slurm.outcome import outcome_of
from pipelines.worker import gpu_checks
from pipelines.worker.blame import blame, late
from pipelines.worker.gpu_checks import gpus_of, wrong_with_gpus
from pipelines.worker.node_checks import check_node, wrong_with_clone
from pipelines.worker.preflight import BadNodes, go_elsewhere
from stages.context import StageError
from stages.selftest.link_rates import INSIDE, Links
from tests.ledger_values import SLURM, launch, task_report

SMI = """#!/bin/sh
case "$1" in
  *hw_slowdown*) printf '%s\\n' "0, GPU-aa, {slow}" "1, GPU-bb, {calm}" ;;
  *) printf '%s\\n' "0, GPU-aa, {first}" "1, GPU-bb, 81559, 4, 0, [N/A]" ;;
esac
"""
CALM = "Not Active, Not Active, Not Active"
HOT = "Active, Active, Not Active"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str, slow: str) -> None:
    """Two GPUs, of which the first is like this."""
    (folder / "nvidia-smi").write_text(SMI.format(first=first, slow=slow, calm=CALM))
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("first", "slow", "visible", "wrong"),
    [
        ("81559, 4, 0", CALM, None, []),
        ("81559, 4, [N/A]", "[N/A], [N/A], [N/A]", None, []),
        ("81559, 4, 3", CALM, None, ["GPU 0 has 3 uncorrected memory errors"]),
        ("81559, 30000, 0", CALM, None, ["GPU 0 is not free: others use 31"]),
        ("40960, 4, 0", CALM, None, ["GPU 0 has 43 GB of memory"]),
        ("81559, 4, 0", HOT, None, ["GPU 0 is slowed down, it is too hot"]),
        ("81559, 4, 3", HOT, "GPU-bb", ["1 of 2 GPUs are visible"]),
        ("81559, 70000, 0, Enabled", CALM, None, []),
        ("81559, 70000, 0, Enabled", CALM, "MIG-aa,MIG-bb", []),
        ("81559, 70000, 0, Enabled", CALM, "MIG-aa", ["1 of 2 GPUs are visible"]),
        ("76806, 4, 0", CALM, None, []),
    ],
)
def test_what_nvidia_smi_tells_of_a_bad_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    slow: str,
    visible: str | None,
    wrong: list[str],
) -> None:
    smi(tmp_path, monkeypatch, first, slow)
    monkeypatch.setattr(gpu_checks, "PAUSE_S", 0.0)
    resources = Resources(device="cuda", gpus_per_node=2, gpu_memory="80G")
    found = list(wrong_with_gpus(resources, visible))
    assert len(found) == len(wrong), found
    assert all(words in text for words, text in zip(wrong, found, strict=True)), found


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [({}, False), ({"gpus_per_node": 1}, True), ({"extra": {"gpus": "h100:1"}}, True)],
)
def test_a_stage_that_asks_for_no_gpu_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], wrong: bool
) -> None:
    """Its profile may name a device for all stages."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, _ = check_node(tmp_path, [], Resources(device="cuda", **asked), Task())
    assert bool(found) is wrong


def test_a_rank_tries_the_gpu_that_it_will_use() -> None:
    resources = Resources(tasks_per_node=4, gpus_per_node=4)
    assert gpus_of(Task(local_rank=2), resources) == [2]
    assert gpus_of(Task(), Resources(gpus_per_node=4)) == [0, 1, 2, 3]


def test_a_file_system_that_cannot_be_read_from_here(tmp_path: Path) -> None:
    """The first page of a process's memory is a file whose reading fails as that of a bad disk."""
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "a").symlink_to("/proc/self/mem")
    (artifact / "b").write_text("fine")
    [wrong] = wrong_with_clone([tmp_path / "gone", artifact])
    assert "the clone is not readable: Input/output error" in wrong


def test_room_that_no_node_has_is_not_a_nodes_fault(tmp_path: Path) -> None:
    wrong, measured = check_node(tmp_path, [], Resources(), Task())
    assert not wrong
    assert measured["disk_write"] > 0
    assert not list(tmp_path.iterdir()), "what was written does not stay"
    full = Resources(preflight=Preflight(disk_free="999999T"))
    with pytest.raises(StageError, match=r"`preflight\.disk_free` is 999999T"):
        check_node(tmp_path, [], full, Task())


def links(
    inside: dict[str, float] | None = None,
    between: dict[tuple[str, str], float] | None = None,
    wrong: tuple[str, ...] = (),
    clocks: dict[str, float] | None = None,
) -> Links:
    return Links(inside or {}, between or {}, wrong, clocks or {})


@pytest.mark.parametrize(
    ("measured", "bad"),
    [
        (links(inside={"a": 5, "b": 0.1}), {"b"}),
        (links(between={("a", "b"): 0.1}), {"a", "b"}),
        (links(between={("a", "b"): 0.1, ("b", "c"): 0.2, ("c", "a"): 5}), {"b"}),
        (links(between={("a", "b"): 5, ("b", "c"): 5, ("c", "d"): 0.1, ("d", "a"): 5}), {"c", "d"}),
        (links(wrong=("a and b",)), {"a", "b"}),
        (links(clocks={"a": 0.0, "b": 0.1, "c": 60.0}), {"c"}),
        (links(clocks={"a": -30.0, "b": 30.0}), {"a", "b"}),
        (links({"a": 5}, {("a", "b"): 5}, (), {"a": 0.0, "b": 9.0}), set()),
    ],
)
def test_who_is_to_blame_for_a_slow_link_or_a_wrong_clock(measured: Links, bad: set[str]) -> None:
    """Two that cannot be told apart share the blame."""
    assert {each.node for each in blame(measured, 1.0, 10.0)} == bad


def beats(*ranks: tuple[int, str]) -> dict[int, dict[str, object]]:
    return {rank: {"beat": beat, "at": at} for rank, (beat, at) in enumerate(ranks)}


def test_collectives_that_hang_name_who_is_silent_or_behind() -> None:
    nodes = {0: "a", 1: "b", 2: "c"}
    on, stuck = f"preflight, {INSIDE}", "preflight, between nodes"
    before = beats((1, on), (1, on), (1, on))
    assert [each.node for each in late(before, beats((5, on), (1, on), (5, on)), nodes, 9)] == ["b"]
    behind = late(before, beats((5, stuck), (5, stuck), (5, on)), nodes, 9)
    assert [each.node for each in behind] == ["c"]
    assert not late(before, beats((5, on), (5, on), (5, on)), nodes, 9), "nobody can be named"
    unread = {rank: beat for rank, beat in beats((5, stuck), (5, on), (5, on)).items() if rank}
    assert [each.node for each in late(before, unread, nodes, 9)] == ["b", "c"]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Of a job whose profile leaves out a node, too, and that may start again twice."""
    made = Attempt(tmp_path / "attempts/001")
    resources = Resources(exclude="old[1-2]", requeues=2, preflight=Preflight(exclude_at_most=2))
    told = (BadNode("one", "told"),)
    made.write(launch(SLURM, resources=resources, excluded=told))
    return made


def found(attempt: Attempt, node: str, restart: int = 0) -> BadNodes:
    bad = (BadNode(node, "it is broken"),)
    report = NodeReport(rank=0, node=node, bad=bad, seconds=0.1, time=1.0)
    files.write(report_path(attempt.folder, restart, "00000", "node", bad=True), report)
    return BadNodes(bad)


def marks(attempt: Attempt) -> dict[str, str]:
    return {path.name: path.read_text() for path in attempt.folder.glob("requeue.*")}


def test_a_job_leaves_a_bad_node_and_those_that_it_was_told_of(attempt: Attempt) -> None:
    ended = go_elsewhere(attempt, Task(job="7"), found(attempt, "two"))
    assert (ended.state, ended.error) == ("bad node", "bad node two (it is broken)")
    assert marks(attempt) == {"requeue.7.0": "old[1-2],one,two\n"}


def test_a_job_that_may_not_start_again_leaves_that_to_the_driver(attempt: Attempt) -> None:
    task = Task(job="7", restart=2)
    assert go_elsewhere(attempt, task, found(attempt, "two", 2)).state == "bad node"
    assert not marks(attempt)


@pytest.mark.parametrize(("state", "elsewhere"), [("FAILED", True), ("CANCELLED", False)])
def test_a_job_that_was_cancelled_after_it_left_its_node_has_no_successor(
    attempt: Attempt, state: str, elsewhere: bool
) -> None:
    """While it waited for another node, its process had last reported the bad one."""
    report = task_report(TaskState.BAD_NODE, error="bad node two (it is broken)")
    files.write(attempt.folder / "tasks/00000.json", report)
    attempt.write(SchedulerView(jobs={"7": SlurmJob("7", state)}, ended=True))
    outcome = outcome_of(attempt)
    assert (outcome.elsewhere, outcome.try_again) == (elsewhere, elsewhere)
    assert ("bad node two" in outcome.what) is elsewhere


def test_a_job_without_enough_nodes_left_says_so(attempt: Attempt) -> None:
    """Slurm keeps it in the queue, with this word and no priority."""
    jobs = {"7": SlurmJob("7", "PENDING", reason="BadConstraints")}
    attempt.write(SchedulerView(jobs=jobs))
    assert "too few nodes without one, which are bad" in why_it_waits(attempt)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (["two", "three"], "3 bad nodes, and `preflight.exclude_at_most` is 2"),
        (["one"], "the job is back on one, which it was to leave out"),
        (["two", "two"], "the job is back on two"),
    ],
)
def test_too_many_bad_nodes_or_the_same_again_fail_the_stage(
    attempt: Attempt, nodes: list[str], words: str
) -> None:
    """Each with its reason."""
    for restart, node in enumerate(nodes):
        error = found(attempt, node, restart)
        ended = go_elsewhere(attempt, Task(job="7", restart=restart), error)
    assert ended.state == "failed"
    assert ended.error
    assert words in ended.error
    assert all(f"{node} (" in ended.error for node in nodes)
    assert "one (told)" in ended.error
    assert "put one" in ended.error


def test_a_stage_overrides_single_keys_of_preflight(tmp_path: Path) -> None:
    (tmp_path / "slurm_profiles").mkdir()
    (tmp_path / "slurm_profiles/mine.yaml").write_text(
        "executor: slurm\n"
        "defaults: {preflight: {disk_write: 0.5, seconds: 9}}\n"
        "stages: {sft: {preflight: {seconds: 30}}, report: {preflight: {enabled: false}}}\n"
    )
    profile = load_profile(tmp_path, "mine")
    assert profile.resources("sft").preflight == Preflight(disk_write=0.5, seconds=30)
    assert profile.resources("report").preflight.enabled is False
    assert profile.resources("score").preflight == Preflight(disk_write=0.5, seconds=9)
