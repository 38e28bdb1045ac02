"""What a self-test says of a machine, well or not: the measurements are made up, nothing is broken.

Runs of the real job are in tests/slurm and tests/pipeline.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.doctor.checks import _selftest
from pipelines.ledger.launch import Launch
from pipelines.ledger.task import Task
from pipelines.selftest import disk
from pipelines.selftest.finding import Finding, Verdict
from pipelines.selftest.host import Job
from pipelines.selftest.job import plan_launch
from pipelines.selftest.judge import judge
from pipelines.selftest.report import Report
from pipelines.selftest.seen import Seen
from pipelines.selftest.settings import (
    Measurement,
    Settings,
    read_measurements,
    write_measurement,
)
from tests.waiting import TIMEOUT_S

RANKS = 4
ECC = "ecc.errors.uncorrected.volatile.total"
ROWS = [
    {"operation": name, "bytes": 256 << 20, "right": True, "gb_per_s": 300.0, "latency_s": 1e-3}
    for name in ("all-reduce", "all-gather", "broadcast")
]
HISTORY = [{"loss": 5.0 - step, "grad_norm": 1.0} for step in range(3)]
WELL: dict[str, dict[str, Any]] = {
    "machine": {
        "python": "3.11.7",
        "cuda": "13.0",
        "gpu_driver": "580.1",
        "gpu": "H200",
        "cpu": "a CPU",
        "kernel": "6.1",
        "packages": {"torch": "2.13.0", "transformers": "5.19.0", "numpy": "2.3.5"},
        "allowed_cores": 8,
        "memory_bytes": 128 << 30,
        "memory_limit_bytes": None,
        "open_files": 65536,
        "slurm_commands": True,
        "gpus": [{"index": "0", ECC: "0"}],
    },
    "compute": {
        "tflops": 700.0,
        "error": 1e-3,
        "repeats": True,
        "digest": "a1",
        "dtype": "bfloat16",
        "gpu": "H200",
        "memory": 140 << 30,
        "visible": 2,
    },
    "collectives": {
        "backend": "nccl",
        "all": ROWS,
        "node": copy.deepcopy(ROWS),
        "clock_offset_s": 0.001,
    },
    "disk": {
        ".lockstep": {
            **{f"{way}_{how}": 1.0 for way in ("write", "read") for how in ("alone", "together")},
            "new_seen_s": 0.01,
            "replaced_seen_s": 0.02,
            "lock": "ok",
            "sync_s": 0.002,
            "free_bytes": 1 << 40,
        }
    },
    "alone": {"history": HISTORY},
    "together": {"history": HISTORY, "digest": "d", "apart": {"weights": 1e-8, "moved": 1e-2}},
    "sampler": {"engine": "torch", "precision": "bfloat16", "mean": 0.001, "largest": 0.01},
    "killed": {"exit_status": 1, "error": "rank 3 on n1 was lost at step 4", "waited_s": 4.2},
    "resumed": {
        "history": HISTORY,
        "digest": "d",
        "resumed_from": 3,
        "apart": {"weights": 0.0, "moved": 1e-2},
    },
}


def measured() -> dict[str, list[Measurement]]:
    """Of four ranks on two nodes with two GPUs each, where all is well."""
    ranks = {
        check: [
            Measurement(check, rank, f"n{rank // 2}", 1.0, copy.deepcopy(values))
            for rank in range(1 if check == "alone" else RANKS)
        ]
        for check, values in WELL.items()
    }
    ranks["killed"][-1].values.update(exit_status=-9, error=None)
    for rank in (1, 3):  # one rank of each node measures the disk
        ranks["disk"][rank].values[".lockstep"] = {}
    return ranks


def findings(ranks: dict[str, list[Measurement]], **resources: Any) -> dict[str, Finding]:
    asked = {"nodes": 2, "tasks_per_node": 2, "gpus_per_node": 2, "device": "cuda", "memory": "64G"}
    seen = Seen(ranks, Resources.model_validate(asked | resources), ExecutorKind.SLURM, 60.0)
    return {finding.check: finding for finding in judge(seen)}


def not_ok(ranks: dict[str, list[Measurement]], **resources: Any) -> Finding:
    """The one check that is not ok, which has a remedy."""
    bad = [each for each in findings(ranks, **resources).values() if each.verdict != "ok"]
    assert len(bad) == 1, bad
    assert bad[0].remedy
    return bad[0]


def test_a_cluster_that_is_well_is_found_so() -> None:
    found = findings(measured())
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["matrix rate"].value == 700.0
    assert found["collectives, all ranks"].value == 300.0
    assert len(found) == 23


def change(ranks: dict[str, list[Measurement]], check: str, rank: int, **values: Any) -> Any:
    ranks[check][rank].values.update(values)


def spoil_row(rank: int, key: str, **values: Any) -> Callable[[Any], None]:
    return lambda ranks: ranks["collectives"][rank].values[key][0].update(values)


def spoil_disk(rank: int, **values: Any) -> Callable[[Any], None]:
    return lambda ranks: ranks["disk"][rank].values[".lockstep"].update(values)


def spoil(check: str, rank: int, **values: Any) -> Callable[[Any], None]:
    return lambda ranks: change(ranks, check, rank, **values)


@pytest.mark.parametrize(
    ("wrong", "check", "verdict", "said"),
    [
        (
            spoil("compute", 3, tflops=500.0),
            "matrix rate",
            "slow",
            "rank 3 on n1 500 (71% of the median)",
        ),
        (spoil("compute", 1, error=0.3), "matrix product", "failed", "rank 1 on n0: off by 0.3"),
        (spoil("compute", 1, repeats=False), "matrix product", "failed", "another result each"),
        (
            spoil("compute", 2, digest="b2"),
            "matrix product",
            "failed",
            "rank 2 on n1: other bits than GPUs of the same kind",
        ),
        (spoil("compute", 0, visible=1), "GPUs", "failed", "rank 0 on n0 sees 1"),
        (
            spoil("machine", 2, gpus=[{"index": "5", ECC: "2"}]),
            "GPU memory (ECC)",
            "failed",
            "GPU 5 of n1: 2",
        ),
        (
            spoil("machine", 2, packages={**WELL["machine"]["packages"], "torch": "2.12.0"}),
            "versions",
            "failed",
            "torch 2.13.0 on n0; 2.12.0 on n1",
        ),
        (spoil("machine", 2, cpu="another"), "versions", "slow", "cpu a CPU on n0; another on n1"),
        (spoil("machine", 0, memory_limit_bytes=1 << 30), "memory", "failed", "1.1 GB a node"),
        (spoil("machine", 1, open_files=100), "open files", "failed", "rank 1 on n0"),
        (spoil("machine", 2, slurm_commands=False), "requeue", "failed", "scontrol on n1"),
        (
            spoil_row(2, "all", right=False),
            "collectives, all ranks",
            "failed",
            "all-reduce of 262144 KiB gave rank 2 on n1 wrong numbers",
        ),
        (spoil_row(2, "all", gb_per_s=1.0), "collectives, all ranks", "slow", "all-reduce 1,"),
        (
            spoil_row(2, "node", gb_per_s=100.0),
            "collectives, within a node",
            "slow",
            "n1 100 (50% of the median)",
        ),
        (spoil("collectives", 3, clock_offset_s=-70.0), "clocks", "failed", "n1 is 70 s off"),
        (
            spoil_disk(2, new_seen_s=None),
            "disk .lockstep, seen by others",
            "failed",
            "n1 never saw a new file",
        ),
        (spoil_disk(2, replaced_seen_s=31.0), "disk .lockstep, seen by others", "slow", "31 s"),
        (
            spoil_disk(2, lock="two nodes held it at once"),
            "disk .lockstep, locks",
            "failed",
            "n1: two nodes held it at once",
        ),
        (spoil_disk(2, write_alone=0.02), "disk .lockstep, write", "slow", "0.02 GB/s a node"),
        (spoil_disk(0, sync_s=0.5), "disk .lockstep, fsync", "slow", "5e+02 ms"),
        (
            spoil("together", 0, history=[{**row, "loss": row["loss"] * 1.01} for row in HISTORY]),
            "ranks equal one",
            "failed",
            "losses 0.01 apart",
        ),
        (
            spoil("together", 0, apart={"weights": 5e-3, "moved": 1e-2}),
            "ranks equal one",
            "failed",
            "weights 0.5 of",
        ),
        (spoil("sampler", 1, mean=0.4), "sampler equals trainer", "failed", "rank 1 on n0"),
        (spoil("killed", 1, error=None), "a rank dies", "failed", "rank 1 on n0 said nothing"),
        (spoil("killed", 1, error="rank 31 was lost"), "a rank dies", "failed", "rank 31"),
        (spoil("killed", 1, waited_s=400.0), "a rank dies", "slow", "400.0 s"),
        (spoil("resumed", 0, resumed_from=0), "kill and resume", "failed", "found no checkpoint"),
        (spoil("resumed", 0, digest="e"), "kill and resume", "failed", "from step 3"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    wrong: Callable[[Any], None], check: str, verdict: str, said: str
) -> None:
    ranks = measured()
    wrong(ranks)
    found = not_ok(ranks)
    assert (found.check, found.verdict) == (check, verdict)
    assert said in found.detail


def test_other_bytes_are_rounding_only_where_the_profile_does_not_ask_for_the_same() -> None:
    ranks = measured()
    change(ranks, "resumed", 0, digest="e", apart={"weights": 1e-7, "moved": 1e-2})
    assert findings(ranks, deterministic=False)["kill and resume"].verdict is Verdict.OK
    assert findings(ranks)["kill and resume"].verdict is Verdict.FAILED


def test_a_check_that_a_rank_could_not_make_has_failed_and_says_why() -> None:
    ranks = measured()
    error = "RuntimeError: CUDA error: no device"
    ranks["together"][1] = Measurement("together", 1, "n0", 1.0, error=error)
    ranks["together"][0] = Measurement("together", 0, "n0", 1.0, error="RankLost: rank 1 failed")
    found = not_ok(ranks)
    assert (found.check, found.detail) == ("training by all ranks", f"rank 1 on n0: {error}")
    assert "nvidia-smi" in found.remedy


def test_what_a_job_that_ended_early_left_out_has_failed() -> None:
    ranks = measured()
    del ranks["killed"][2:], ranks["resumed"]
    found = findings(ranks)
    bad = {name: each.detail for name, each in found.items() if each.verdict is Verdict.FAILED}
    assert bad == {
        "not reached": "going on from a checkpoint",
        "a rank that dies": "no result of rank 2, 3: the job ended before it",
    }
    assert findings({}).keys() == {"not reached"}


def report(found: list[Finding], folder: Path = Path("clone/.lockstep/selftest/001")) -> Report:
    return Report("slurm", "sft", "7", 2, 4, 1.0, 61.0, folder, found, measured())


def test_the_page_has_a_line_a_check_and_one_sentence_at_the_end() -> None:
    disk = Finding("disk", Verdict.OK, "fast", remedy="buy another")
    well = [disk, Finding("gpu", Verdict.OK, "")]
    slow = Finding("net", Verdict.SLOW, "1 GB/s", 1.0, "GB/s", "use the other network")
    page = report(well).page().splitlines()
    assert page[0] == "profile slurm, as for sft: 2 nodes, 4 ranks, job 7, 1 min 01 s"
    assert page[2] == "ok      disk  fast"
    assert page[-2] == "all 2 checks are ok; exit status 0"
    assert not any("buy" in line for line in page)
    page = report([*well, slow]).page().splitlines()
    assert "              -> use the other network" in page
    assert page[-2].endswith("slow or uneven: net; exit status 0")
    failed = report([slow, Finding("gpu", Verdict.FAILED, "gone")])
    assert failed.page().splitlines()[-2] == "failed: gpu (1 of 2 checks); exit status 1"
    assert report([]).exit_status == 1, "what nobody checked is not well"


def test_the_json_is_versioned_and_has_all_that_was_measured(tmp_path: Path) -> None:
    bad = Finding("weights", Verdict.FAILED, "far", value=float("inf"))
    report([bad], tmp_path).write(tmp_path)
    text = (tmp_path / "report.json").read_text()
    assert "Infinity" not in text
    found = json.loads(text)
    assert (found["version"], found["verdict"]) == (1, "failed")
    assert found["findings"][0]["value"] is None
    assert found["measured"]["compute"][2]["values"]["tflops"] == 700.0
    assert (tmp_path / "report.txt").read_text() == report([bad], tmp_path).page() + "\n"


def test_what_a_rank_wrote_is_read_as_it_was(tmp_path: Path) -> None:
    mine = Measurement("compute", 3, "n1", 1.5, {"tflops": 1.0})
    write_measurement(tmp_path, mine)
    assert read_measurements(tmp_path) == {"compute": [mine]}


PROFILES = {
    "here": "executor: local\n",
    "gpus": "executor: slurm\ndefaults: {device: cuda, gpus_per_node: 2, tasks_per_node: 2}\n"
    "stages:\n  policy_update: {nodes: 4}\n",
    "sequences": "executor: slurm\ndefaults: {tasks_per_node: 2, sequence_parallel: 2}\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "slurm_profiles").mkdir()
    for name, text in PROFILES.items():
        (tmp_path / f"slurm_profiles/{name}.yaml").write_text(f"description: x\n{text}")
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines/code.py").touch()
    return Repository(tmp_path)


def plan(repository: Repository, profile: str, **asked: Any) -> Any:
    usual = {"stage": None, "nodes": None, "tasks_per_node": None, "minutes": 20}
    return plan_launch(repository, profile, **usual | asked)


def test_the_job_is_as_that_of_the_training_stage_with_the_most_ranks(
    repository: Repository,
) -> None:
    launch, stage = plan(repository, "gpus")
    assert (stage, launch.resources.nodes, launch.tasks_per_job) == ("policy_update", 4, 8)
    launch, stage = plan(repository, "gpus", stage="sft", tasks_per_node=1)
    assert (launch.resources.gpus_per_node, launch.tasks_per_job) == (1, 1)
    assert launch.resources.time_minutes == 20


@pytest.mark.parametrize(
    ("profile", "asked", "said"),
    [
        ("here", {"nodes": 2}, "here.yaml has `executor` local, which is this machine alone"),
        ("gpus", {"stage": "sfft"}, "--stage sfft: stages are"),
        ("sequences", {"nodes": 1, "tasks_per_node": 3}, "`sequence_parallel` 2 does not divide 3"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_key(
    repository: Repository, profile: str, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(LockstepError, match=said):
        plan(repository, profile, **asked)


def test_doctor_tells_of_the_last_self_test(repository: Repository, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCKSTEP_PROFILE", "slurm")
    (repository.root / "slurm_profiles/slurm.yaml").write_text("executor: slurm\n")
    [never] = _selftest(repository)
    assert "never run: `lockstep selftest --profile slurm`" in never.detail
    folder = repository.home / "selftest/001"
    report([Finding("gpu", Verdict.FAILED, "gone")], folder).write(folder)
    [last] = _selftest(repository)
    assert not last.fine
    assert "failed: gpu" in last.detail


class Thread:
    """A rank of two that meet in this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self._barrier, self._values = rank, barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(TIMEOUT_S)
        gathered = list(self._values)
        self._barrier.wait(TIMEOUT_S)
        return gathered


def two_nodes(folder: Path) -> list[dict[str, Any]]:
    """What two threads find, each a node of its own."""
    barrier, values = threading.Barrier(2), [None, None]
    ranks = [Thread(rank, barrier, values) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(disk.measure, rank, f"n{rank.rank}", folder) for rank in ranks]
        return [job.result() for job in jobs]


@pytest.fixture
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SECONDS", 0.0)
    monkeypatch.setattr(disk, "SEEN_S", 0.2)


@pytest.mark.usefixtures("_quick_disk")
def test_a_file_system_that_nodes_share_is_seen_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SEEN_S", TIMEOUT_S)
    first, second = two_nodes(tmp_path)
    assert first["lock"] == second["lock"] == "ok"
    assert second["new_seen_s"] < TIMEOUT_S
    assert second["replaced_seen_s"] < TIMEOUT_S
    assert all(first[f"{way}_alone"] > 0 for way in ("write", "read"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "news"]


@pytest.mark.usefixtures("_quick_disk")
def test_a_disk_that_is_no_shared_one_and_has_no_locks_is_seen_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_lock(_: Path) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(disk, "hold_lock", no_lock)
    monkeypatch.setattr(disk, "_text", lambda _: None)
    _, second = two_nodes(tmp_path)
    assert second["lock"] == "two nodes held it at once"
    assert second["new_seen_s"] is None


@pytest.mark.usefixtures("_quick_disk")
def test_other_bytes_than_were_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write_speed(tmp_path / "data", 0.0, 1)
    monkeypatch.setattr(disk, "PIECE", bytes(len(disk.PIECE)))
    with pytest.raises(LockstepError, match="not what another node wrote"):
        disk._read(tmp_path / "data", 1.0)


@pytest.mark.parametrize(("job", "gpus"), [("7", 1), ("7", 2), (None, 2)])
def test_ranks_take_the_gpus_of_their_node_in_turn(
    tmp_path: Path, job: str | None, gpus: int
) -> None:
    resources = Resources(device="cuda", tasks_per_node=2, gpus_per_node=gpus)
    launch = Launch(
        executor=ExecutorKind.SLURM,
        profile="gpus",
        resources=resources,
        clone=tmp_path,
        root=tmp_path,
        code=tmp_path,
        user=0,
    )

    def device(rank: int) -> str:
        task = Task(rank=rank, world=2, local_rank=rank, job=job)
        host = Job(tmp_path, launch, Settings({}), task, "node")
        return host.context("compute", "compute", checkpoint_seconds=1.0).device

    assert [device(rank) for rank in range(2)] == ["cuda:0", f"cuda:{gpus - 1}"]
