"""A model whose weights are left in their files is, once they are read, the one that is loaded."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from stages.context import StageError
from stages.contracts.lora import LoraParams
from stages.contracts.sharding import Sharding
from stages.engines.models.folders import (
    load_policy,
    load_scalar_model,
    save_beside_weights,
    save_model,
    start_scalar_model,
)
from stages.engines.models.lora import open_for_training
from stages.engines.models.unread import give_memory, to_learn, unread_weights
from stages.engines.models.weights import check_weights
from stages.engines.processes.ranks import ALONE
from tests.models.families import FAMILIES, write_family
from tests.stages.conftest import Runner, rewrite_weights

SPREAD = SimpleNamespace(ranks=ALONE, sharding=Sharding.FSDP)
BY_ROWS = {"llama", "qwen2", "qwen3", "mistral", "granite", "olmo2", "cohere", "phi3"}
"""Families of which each must be, so that a fallback cannot hide in the test."""


def read(model):
    """What ranks do part by part."""
    unread = unread_weights(model)
    give_memory(model)
    for name, weight in unread.items():
        half = weight.tensor.shape.numel() // 2
        numbers = model.get_parameter(name).data.view(-1)
        for part, start in ((numbers[:half], 0), (numbers[half:], half)):
            weight.read_into(part, start)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_read_by_rows(tmp_path, family):
    folder = write_family(tmp_path / "model", family)
    settings = folder / "generation_config.json"
    own = {"repetition_penalty": 1.25}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **own}))
    model, whole = to_learn(load_policy, SPREAD)(folder, "cpu"), load_policy(folder)
    if family in BY_ROWS:
        assert unread_weights(model)
    check_weights(read(model), folder)
    assert model.training == whole.training
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in whole.named_parameters()
    }
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    for kind, one in (("rows", model), ("whole", whole)):
        save_model(one, tmp_path / kind, tokenizer_from=folder)
        save_beside_weights(one, tmp_path / f"beside-{kind}", folder)
    assert Runner.contents(tmp_path / "rows") == Runner.contents(tmp_path / "whole")
    assert Runner.contents(tmp_path / "beside-rows") == Runner.contents(tmp_path / "beside-whole")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["policy", "new head", "head"])
def test_a_model_with_a_head_or_an_adapter_is_the_same(tmp_path, kind, rank):
    """An adapter copies a scalar head, and has numbers that are drawn."""
    folder, load = write_family(tmp_path / "base", "llama"), load_policy
    if kind != "policy":
        load = start_scalar_model
    if kind == "head":
        model = start_scalar_model(folder)
        torch.nn.init.normal_(model.score.weight)
        folder, load = tmp_path / "scalar", load_scalar_model
        save_model(model, folder, tokenizer_from=tmp_path / "base")
    lora = LoraParams(rank=rank)
    whole = open_for_training(load, folder, "cpu", lora, 3)
    model = open_for_training(to_learn(load, SPREAD), folder, "cpu", lora, 3)
    assert unread_weights(model)
    found, expected = read(model).state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_until_then_no_weight_takes_memory(tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    model = to_learn(load_policy, SPREAD)(folder, "cpu")
    weights = list(model.parameters())
    assert {weight.untyped_storage().nbytes() for weight in weights} == {4}
    assert [w.shape for w in weights] == [w.shape for w in load_policy(folder).parameters()]


def test_where_nothing_is_spread_models_are_loaded_as_ever():
    for changes in ({"ranks": None}, {"sharding": Sharding.ZERO2}):
        assert to_learn(load_policy, SimpleNamespace(**{**vars(SPREAD), **changes})) is load_policy
    other = lambda folder, device: None  # noqa: ARG005, E731
    assert to_learn(other, SPREAD) is other


def test_what_files_have_beside_the_model_or_in_another_shape_is_an_error(tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    weights = folder / "model.safetensors"
    load = to_learn(load_policy, SPREAD)
    before = weights.read_bytes()
    rewrite_weights(weights, lambda tensors: tensors.update(more=torch.ones(3)))
    with pytest.raises(StageError, match="has a tensor more that the model has no place for"):
        load(folder, "cpu")
    weights.write_bytes(before)
    rewrite_weights(weights, lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(StageError, match=r"model\.norm\.weight has shape \(5,\) in the file"):
        load(folder, "cpu")
    weights.write_bytes(before)
    rewrite_weights(weights, lambda tensors: tensors["model.norm.weight"][0].fill_(torch.nan))
    with pytest.raises(StageError, match=r"model\.norm\.weight has numbers that are not finite"):
        read(load(folder, "cpu"))


def test_a_part_that_is_not_the_files_is_an_error(tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    model = to_learn(load_policy, SPREAD)(folder, "cpu")

    class Spoilt(torch.Tensor):
        """Memory that keeps other numbers than it is given, which real memory does not do."""

        def copy_(self, other):
            return torch.Tensor.copy_(self, other + 0.5)

    weight = unread_weights(model)["model.norm.weight"]
    part = copy.copy(torch.zeros(weight.tensor.shape)).as_subclass(Spoilt)
    with pytest.raises(StageError, match=r"model\.norm\.weight in memory is not what the file"):
        weight.read_into(part, 0)
