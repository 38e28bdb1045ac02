"""What `lockstep doctor` says of a profile, asked of a real cluster."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipelines.base.repository import Repository
from pipelines.doctor.result import CheckResult
from pipelines.doctor.slurm import examine_slurm


@pytest.fixture
def examine(cluster: Any, tmp_path: Path) -> Any:
    """What is found where the profile `mine` has these defaults."""

    def of(defaults: str, **variables: str) -> list[CheckResult]:
        (tmp_path / "slurm_profiles").mkdir(exist_ok=True)
        text = f"description: mine\nexecutor: slurm\ndefaults: {{{defaults}}}\n"
        (tmp_path / "slurm_profiles/mine.yaml").write_text(text)
        with mock.patch.dict(os.environ, {**cluster.environment, **variables}):
            return list(examine_slurm(Repository(tmp_path), "mine"))

    return of


def test_a_profile_that_the_cluster_can_run_is_fine(examine: Any) -> None:
    found = examine("partition: cpu, memory: 1G")
    assert all(finding.fine for finding in found)
    assert found[-1].detail == "all stages: Slurm would take them"


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ("partition: nope", "Invalid partition name"),
        ("partition: cpu, memory: 900G", "node configuration is not available"),
        ("partition: cpu, time_minutes: 100000", "time limit is invalid"),
        ("partition: gpu, gpus_per_node: 64", "node configuration is not available"),
        ("partition: cpu, constraint: h900", "Invalid feature"),
        ("partition: cpu, reservation: march", "reservation is invalid"),
    ],
)
def test_what_no_node_or_partition_allows_is_named(examine: Any, defaults: str, said: str) -> None:
    [finding] = [finding for finding in examine(defaults) if not finding.fine]
    assert said in finding.detail
    assert defaults.rpartition(", ")[2].replace(":", "") in finding.detail
    assert "slurm_profiles/mine.yaml" in finding.remedy


def test_a_time_limit_that_only_the_partition_knows_is_found(examine: Any, tmp_path: Path) -> None:
    """A site that does not enforce it lets such a job wait for ever: sinfo and sbatch are fakes."""
    answers = {"sinfo": "printf 'short*|30:00\\nlong|infinite\\n'", "sbatch": "cat > /dev/null"}
    path = with_commands(tmp_path, answers)
    [finding] = [finding for finding in examine("time_minutes: 31", PATH=path) if not finding.fine]
    assert "`time_minutes` 31 is more than the 30 that partition short allows" in finding.detail
    assert all(finding.fine for finding in examine("time_minutes: 30", PATH=path))
    assert all(finding.fine for finding in examine("partition: long", PATH=path))


def test_an_account_that_accounting_does_not_know_is_found(examine: Any, tmp_path: Path) -> None:
    """The cluster of the tests has no accounting: its answer is one that was written down."""
    path = with_commands(tmp_path, {"sacctmgr": "printf 'physics|normal,high\\nllm|normal\\n'"})
    fine = "partition: cpu, account: llm, qos: high"
    assert all(finding.fine for finding in examine(fine, PATH=path))
    for asked in ("account: nobody", "qos: urgent"):
        [finding] = [f for f in examine(f"partition: cpu, {asked}", PATH=path) if not f.fine]
        assert f"accounting has no `{asked.replace(': ', '` ')} for you" in finding.detail


def with_commands(folder: Path, answers: dict[str, str]) -> str:
    """A PATH on which these commands come first."""
    (folder / "bin").mkdir()
    for name, answer in answers.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "bin" / name).chmod(0o755)
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
