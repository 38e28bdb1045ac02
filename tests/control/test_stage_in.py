"""Inputs that a job reads from its node's own disk: the same bytes, or the shared folder."""

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.profiles import Resources
from pipelines.config.stage_in import Staged, StageIn
from pipelines.identity.hashing import hash_bytes
from pipelines.identity.spec import Artifact, Spec
from pipelines.ledger.task import Task
from pipelines.worker.inputs import check_inputs
from pipelines.worker.stage_in import Staging, _name_of, staging
from stages.context import Context, StageError, Stopped
from tests.control.made_up import SPEC
from tests.ledger_values import SLURM, launch

ALONE = Task()


@dataclass
class Node:
    """A node with its own disk, and a stage that reads a folder and a file, of 4 MB in all."""

    spec: Spec
    root: Path

    @property
    def disk(self) -> Path:
        return self.root / "local"

    def job(
        self, size: str = "10M", task: Task = ALONE, disk: Path | None = None, **context: Any
    ) -> AbstractContextManager[Staging]:
        stage_in = StageIn(folder=str(disk or self.disk), size=size, what=[Staged.INPUTS])
        resources = Resources(stage_in=stage_in, nodes=task.world)
        its = Context("sft", None, 1, self.root, heartbeats=self.root, **context)
        return staging(self.spec, launch(SLURM, root=self.root, resources=resources), task, its)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "model/part").mkdir(parents=True)
    (tmp_path / "model/part/weights").write_bytes(bytes(range(256)) * 12_000)
    (tmp_path / "model/config").write_text("{}")
    (tmp_path / "rows.jsonl").write_bytes(b"a row\n" * 150_000)
    names = {"model": "model", "rows": "rows.jsonl"}
    hashed = {name: Artifact(at, hash_bytes(tmp_path / at)) for name, at in names.items()}
    return Node(replace(SPEC, inputs=hashed), tmp_path)


def test_an_input_is_copied_once_and_found_by_the_next_job(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    with node.job() as job:
        job.bring()
        assert job.left == []
        assert [path.name for path in job.inputs.values()] == ["model", "rows.jsonl"]
        for name, path in job.inputs.items():
            assert path.is_relative_to(node.disk)
            assert hash_bytes(path) == node.spec.inputs[name].hash
    assert "rows: copied to this node's disk, 1 MB in" in capfd.readouterr().out
    # What the driver has made of the shared folder since is not asked again.
    (node.root / "rows.jsonl").chmod(0o600)
    with node.job() as again:
        again.bring()
        assert again.inputs == job.inputs
    assert "rows: found on this node's disk" in capfd.readouterr().out


def test_without_stage_in_the_shared_folder_is_read(node: Node) -> None:
    context = Context("sft", None, 1, node.root)
    with staging(node.spec, launch(SLURM, root=node.root), Task(), context) as job:
        job.bring()
        assert job.inputs == {"model": node.root / "model", "rows": node.root / "rows.jsonl"}
        assert job.left == ["model", "rows"]


def test_a_full_disk_or_none_is_a_warning_and_the_shared_folder_is_read(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    with node.job(size="2M") as job:
        job.bring()
        assert job.left == ["model"]
        assert job.inputs["model"] == node.root / "model"
        assert job.inputs["rows"].is_relative_to(node.disk)
    said = capfd.readouterr().err
    assert "warning: the input `model` is read from the shared folder" in said
    assert "`stage_in.size`" in said
    with node.job(disk=node.root / "no/such/disk") as job:
        job.bring()
        assert job.left == ["model", "rows"]
    assert "warning: this node's own disk is not used" in capfd.readouterr().err


def test_a_copy_that_has_rotted_is_made_anew(node: Node) -> None:
    with node.job() as job:
        job.bring()
        copy = job.inputs["rows"]
    copy.chmod(0o600)
    copy.write_bytes(b"a rat\n" * 150_000)
    with node.job() as job:
        job.bring()
        assert hash_bytes(job.inputs["rows"]) == node.spec.inputs["rows"].hash
        assert job.left == []


def test_an_input_that_was_changed_since_is_refused_and_not_kept(node: Node) -> None:
    (node.root / "rows.jsonl").write_text("other rows\n")
    with node.job() as job:
        job.bring()
        assert job.left == ["rows"]
        with pytest.raises(StageError, match=r"its input `rows` .* is not what the stage was"):
            check_inputs(node.spec, node.root, lambda: False, job.left)
    assert len(list(node.disk.glob("*/[!.]*"))) == 1, "only the model"


def test_a_job_that_is_told_to_stop_ends_its_copy(node: Node) -> None:
    stopped = Context("sft", None, 1, node.root)
    stopped.request_stop()
    with node.job(_stop=stopped._stop) as job, pytest.raises(Stopped):
        job.bring()
    assert not list(node.disk.glob("*/[!.]*"))


def test_ranks_read_from_their_disks_what_every_node_has(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two nodes, and two ranks on the second, of which one brings and both read."""

    def on(name: str, rank: int, local_rank: int) -> Task:
        monkeypatch.setenv("SLURMD_NODENAME", name)
        return Task(rank=rank, world=2, local_rank=local_rank)

    with node.job(task=on("node1", 0, 0)) as first:
        first.bring()
        assert first.left == []
    with node.job(task=on("node2", 1, 0), disk=node.root / "elsewhere", size="2M") as second:
        second.bring()
        assert second.left == ["model"]
    # This machine has one disk: what the second node has there lies at the path of the first.
    of_second = {"inputs": {"rows": str(first.local["rows"])}, "scratch": ""}
    (node.root / "node2.stage-in.json").write_text(json.dumps(of_second))
    with node.job(task=on("node2", 2, 1)) as third:
        for job in (first, third):
            job.agree()
            assert job.inputs == {"model": node.root / "model", "rows": first.local["rows"]}
    assert "the input `model` is read from the shared folder: a node does" in capfd.readouterr().err


def test_checkpoints_of_different_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, again, other = tmp_path / "1", tmp_path / "1", tmp_path / "2"
    other.mkdir()
    first.mkdir()
    assert _name_of(first) == _name_of(again) != _name_of(other)
    (other / ".name").write_text("")  # as a crash of the file system may leave it
    with pytest.raises(OSError, match="damaged: remove it"):
        _name_of(other)


def test_messages_name_the_paths_that_people_know(node: Node) -> None:
    with node.job() as job:
        job.bring()
        path = job.inputs["rows"]
        assert job.in_users_words(f"{path}: row 3") == f"{node.root / 'rows.jsonl'}: row 3"
