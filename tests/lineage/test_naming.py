"""Short names come from the catalog of stages, and lead back to where they come from."""

import pytest

from pipelines.lineage.naming import paths_called, role_of, short_name
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("policy@iter_003", "artifacts/policies/iter_003/model"),
        ("policy@sft", "artifacts/policies/sft/model"),
        ("model@sft", "artifacts/policies/sft/model"),
        ("state@iter_001", "artifacts/policies/iter_001/state"),
        ("rollouts@iter_001", "artifacts/rollouts/iter_001.parquet"),
        ("scores@iter_001", "artifacts/scores/iter_001.parquet"),
        ("prompts", "artifacts/data/prompts.parquet"),
        ("report", "artifacts/report"),
    ],
)
def test_a_short_name_means_a_path(name: str, path: str) -> None:
    assert paths_called(name)[0] == path


@pytest.mark.parametrize("name", ["policy", "prompts@iter_001", "nothing@iter_001", "", "@"])
def test_what_is_no_short_name_means_nothing(name: str) -> None:
    assert paths_called(name) == []


def test_every_output_of_the_graph_has_a_short_name_that_leads_back() -> None:
    params = Params.model_validate({"rl": {"preferences": {"dpo": {"policy": "sft"}}}})
    for node in bind_all(params):
        for path in node.outs.values():
            assert path in paths_called(short_name(path)), path


def test_every_input_and_output_has_the_name_of_its_contract() -> None:
    for node in bind_all(Params()):
        for role, path in node.outs.items():
            assert role_of(node.address, path, among_inputs=False) == role
        distinct = {path: role for role, path in node.inputs.items()}
        for path, role in distinct.items():
            # What the user may put anywhere is called by its path, where two could be meant.
            assert role_of(node.address, path, among_inputs=True) in (role, path)


def test_a_stage_that_no_catalog_knows_calls_things_by_their_paths() -> None:
    assert role_of("mine@x", "a/b", among_inputs=True) == "a/b"
    assert short_name("a/b") == "a/b"
