"""What is found out about a policy, from dvc.lock and the files that it tells of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.base.repository import Repository
from pipelines.export.provenance import find_policy
from pipelines.identity.hashing import HashCache
from tests.lineage.world import git

MODEL = "artifacts/policies/sft/model"


def write(root: Path, folder: str, **files: str) -> str:
    """The folder's hash."""
    (root / folder).mkdir(parents=True)
    for name, text in files.items():
        (root / folder / name.replace("__", ".")).write_text(text)
    return HashCache().of(root / folder)


def record(inputs: Mapping[str, str], outs: Mapping[str, str]) -> dict[str, Any]:
    """A stage of dvc.lock."""
    return {
        "deps": [{"path": path, "md5": digest} for path, digest in inputs.items()],
        "outs": [{"path": path, "md5": digest} for path, digest in outs.items()],
    }


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A base model with its licence, and a policy that was made from it."""
    git(tmp_path, "init", "-q")
    (tmp_path / "params.yaml").write_text("seed: 17\n")
    card = "---\nlicense: apache-2.0\n---\n# A base\n"
    base = write(tmp_path, "artifacts/base", config__json="{}", README__md=card, LICENSE="Yes.")
    policy = write(tmp_path, MODEL, config__json="{}")
    stages = {
        "prepare": record({"data": "d", "models": "m"}, {"artifacts/base": base}),
        "sft": record({"artifacts/base": base}, {MODEL: policy}),
    }
    YAML().dump({"schema": "2.0", "stages": stages}, tmp_path / "dvc.lock")
    return Repository(tmp_path)


def test_the_licence_is_that_of_the_base_model(repository: Repository) -> None:
    found = find_policy(repository, "sft")
    assert found.base_card == {"license": "apache-2.0"}
    assert {name: path.read_text() for name, path in found.licences.items()} == {"LICENSE": "Yes."}


def test_a_base_model_that_is_gone_keeps_no_policy_here(repository: Repository) -> None:
    (repository.root / "artifacts/base/config.json").write_text("changed")
    found = find_policy(repository, "sft")
    assert list(found.files) == ["config.json"]
    assert (found.base_card, found.licences) == ({}, {})


def test_metrics_that_are_not_those_of_the_record_are_left_out(repository: Repository) -> None:
    """A card must not say of a policy what was measured of another."""
    lock, metrics = repository.root / "dvc.lock", repository.root / "metrics/evaluations/sft.json"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"accuracy": 0.5}')
    recorded = YAML(typ="safe").load(lock.read_text())
    model = {out["path"]: out["md5"] for out in recorded["stages"]["sft"]["outs"]}
    measured = {"metrics/evaluations/sft.json": HashCache().of(metrics)}
    recorded["stages"]["evaluate_sft"] = record(model, measured)
    YAML().dump(recorded, lock)
    assert find_policy(repository, "sft").evaluation == {"accuracy": 0.5}
    metrics.write_text('{"accuracy": 0.9}')
    assert find_policy(repository, "sft").evaluation == {}
