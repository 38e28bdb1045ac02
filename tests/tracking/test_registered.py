"""A version of a registered model says what is known of its policy, also what is known later."""

import json
from dataclasses import replace
from pathlib import Path

from fake_clone import FakeClone
from fake_policy import write_policy
from mlflow.entities.model_registry import ModelVersion

from pipelines.export.provenance import Provenance
from pipelines.export.registry import register_version
from pipelines.tracking.store import Store

UNKNOWN = "This policy was not evaluated."


def register(clone: FakeClone, found: Provenance, name: str = "lockstep") -> ModelVersion:
    number = register_version(Store(clone.repository), clone.repository, found, name=name).version
    return clone.client.get_model_version(name, number)


def evaluated(found: Provenance, accuracy: float = 0.5) -> Provenance:
    return replace(found, evaluation={"accuracy": accuracy})


def test_an_evaluation_that_comes_later_reaches_the_version(clone: FakeClone) -> None:
    found = write_policy(clone.root / "policy")
    before = register(clone, found)
    weights = Path(before.source) / "model.safetensors"
    inode = weights.stat().st_ino
    assert UNKNOWN in before.description
    assert "lockstep.metric.accuracy" not in before.tags

    after = register(clone, evaluated(found))
    assert after.version == before.version
    assert after.tags == {**before.tags, "lockstep.metric.accuracy": "0.5"}
    assert "| accuracy | 0.5 |" in after.description
    card = (Path(after.source) / "README.md").read_text()
    assert "| accuracy | 0.5 |" in card
    assert "| `model.safetensors` (sha256) |" in card
    lineage = json.loads((Path(after.source) / "lineage.json").read_text())
    assert lineage["evaluation"] == {"accuracy": 0.5}
    assert weights.stat().st_ino == inode, "weights stay where they are"
    assert register(clone, evaluated(found, 0.25)).tags["lockstep.metric.accuracy"] == "0.25"


def test_another_model_of_the_same_folder_says_it_too(clone: FakeClone) -> None:
    found = write_policy(clone.root / "policy")
    register(clone, found)
    version = register(clone, evaluated(found), name="mine")
    assert UNKNOWN not in (Path(version.source) / "README.md").read_text()


def test_who_knows_less_takes_nothing_away(clone: FakeClone) -> None:
    found = write_policy(clone.root / "policy")
    known = register(clone, evaluated(found))
    card = (Path(known.source) / "README.md").read_bytes()
    twin = replace(evaluated(found, 0.75), policy="iter_002")
    for other in (found, twin):
        after = register(clone, other)
        assert (after.tags, after.description) == (known.tags, known.description)
        assert (Path(after.source) / "README.md").read_bytes() == card


def test_an_adapter_is_registered_as_one_and_the_version_says_how_to_load_it(
    clone: FakeClone,
) -> None:
    found = write_policy(clone.root / "policy", "adapter_model.safetensors")
    (clone.root / "policy/adapter_config.json").write_text("{}")
    files = {**found.files, "adapter_config.json": clone.root / "policy/adapter_config.json"}
    version = register(clone, replace(found, files=files))
    assert (Path(version.source) / "adapter_config.json").is_file()
    for text in (version.description, (Path(version.source) / "README.md").read_text()):
        assert "PeftModel.from_pretrained(base, folder)" in text
