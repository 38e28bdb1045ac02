"""A model in memory is what its folder holds, or it is not used."""

import hashlib
import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from stages.context import StageError
from stages.engines.models import folders
from stages.engines.models.folders import (
    load_policy,
    load_scalar_model,
    start_scalar_model,
)
from stages.engines.models.weights import check_weights
from tests.stages.conftest import rewrite_weights
from tests.stages.test_lora import learnt_adapter, opened, write_base

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=["plain", "tied", "sharded", "bfloat16", "adapter", "gpt2", "mixtral"])
def folder(request, tmp_path):
    """A policy in each form that a folder may have."""
    path = tmp_path / "policy"
    small = {"vocab_size": 20, "num_attention_heads": 2, "eos_token_id": 2, "pad_token_id": 0}
    if request.param in ("plain", "tied"):
        return write_base(path, tied=request.param == "tied")
    if request.param == "adapter":
        learnt_adapter(write_base(tmp_path / "base"), path)
        assert not (path / "model.safetensors").exists()
        return path
    if request.param == "gpt2":
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **small)).save_pretrained(path)
        return path
    if request.param == "mixtral":  # experts are fused in memory and apart in the file
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                               num_key_value_heads=1, num_local_experts=3, **small)  # fmt: skip
        MixtralForCausalLM(config).save_pretrained(path)
        return path
    model = load_policy(write_base(tmp_path / "base"))
    if request.param == "bfloat16":
        model.to(torch.bfloat16).save_pretrained(path)
    else:
        model.save_pretrained(path, max_shard_size="4KB")
        assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_what_older_libraries_stored_and_newer_ones_compute_may_be_in_the_file(
    tmp_path, kind, name
):
    path = tmp_path / "policy"
    if kind == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20)
        GPT2LMHeadModel(config).save_pretrained(path)
    else:
        write_base(path)
    stored = {name: torch.ones(1, 1, 4, 4)}
    rewrite_weights(path / "model.safetensors", lambda tensors: tensors.update(stored))
    load_policy(path)


def test_a_folder_of_any_form_is_loaded_and_one_changed_bit_is_seen(folder):
    model = load_policy(folder)
    for name, tensor in model.state_dict().items():
        flat = tensor.view(-1)
        before = flat[-1].clone()
        flat[-1] = torch.nextafter(before, before + 1)
        with pytest.raises(StageError, match=r"in memory is not what the file holds"):
            check_weights(model, folder)
        flat[-1] = before
        assert torch.equal(model.state_dict()[name], tensor)
    check_weights(model, folder)


@pytest.fixture
def changed(tmp_path):
    """A policy whose file was changed since it was saved."""

    def write(change):
        folder = write_base(tmp_path / "policy")
        rewrite_weights(folder / "model.safetensors", change)
        return folder

    return write


@pytest.mark.parametrize("load", [load_policy, start_scalar_model])
def test_a_tensor_that_is_missing_from_the_file_is_not_made_up(changed, load):
    folder = changed(lambda tensors: tensors.pop(UP))
    with pytest.raises(StageError, match=rf"has no tensor {UP}, so .* at random"):
        load(folder)


def test_a_missing_tensor_of_one_shard_is_named(tmp_path):
    whole = load_policy(write_base(tmp_path / "base"))
    whole.save_pretrained(tmp_path / "policy", max_shard_size="4KB")
    index = tmp_path / "policy/model.safetensors.index.json"
    told = json.loads(index.read_text())
    shard = tmp_path / "policy" / told["weight_map"].pop(UP)
    index.write_text(json.dumps(told))
    rewrite_weights(shard, lambda tensors: tensors.pop(UP))
    with pytest.raises(StageError, match=UP):
        load_policy(tmp_path / "policy")


def test_a_head_that_is_not_tied_must_be_in_the_file(changed, tmp_path):
    load_policy(write_base(tmp_path / "tied", tied=True))
    folder = changed(lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(StageError, match=r"has no tensor lm_head\.weight"):
        load_policy(folder)


def test_a_tensor_that_fits_nowhere_is_refused(changed):
    folder = changed(lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    with pytest.raises(StageError, match=r"model\.layers\.9\.extra that the model has no place"):
        load_policy(folder)
    with pytest.raises(StageError, match=r"model\.layers\.9\.extra"):
        start_scalar_model(folder)


def test_a_policy_is_not_a_reward_model(tmp_path):
    """Its head would be random; only `start_scalar_model` gives it a new one, of zeros."""
    folder = write_base(tmp_path / "policy")
    with pytest.raises(StageError, match=r"has no tensor score\.weight"):
        load_scalar_model(folder)
    assert not start_scalar_model(folder).score.weight.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(changed, bad):
    folder = changed(lambda tensors: tensors[UP][1].fill_(bad))
    with pytest.raises(StageError, match=rf"tensor {UP} has numbers that are not finite"):
        load_policy(folder)


def test_an_adapter_that_goes_on_is_the_one_in_the_file(tmp_path):
    learnt_adapter(write_base(tmp_path / "base"), tmp_path / "policy")
    path = tmp_path / "policy/adapter_model.safetensors"
    rewrite_weights(path, lambda tensors: next(iter(tensors.values()))[0].fill_(float("nan")))
    with pytest.raises(StageError, match=r"adapter_model\.safetensors: tensor .* is not finite"):
        opened(tmp_path / "policy")


@pytest.mark.parametrize("hashers", [1, 3, 16])
def test_a_hash_is_of_weights_in_their_order_whoever_hashes_which(monkeypatch, hashers):
    monkeypatch.setattr(folders, "HASHERS", hashers)
    weights = [(f"w{i}", torch.full((7 - i % 5, 2), float(i))) for i in range(20)]
    digest = hashlib.sha256()
    for name, one in weights:
        of_bytes = hashlib.sha256(one.numpy().tobytes()).hexdigest()
        digest.update(f"{name} {tuple(one.shape)} torch.float32 {of_bytes}\n".encode())
    expected = digest.hexdigest()
    assert folders.hash_of_weights(iter(weights)) == expected
    assert folders.hash_of_weights(reversed(weights)) != expected
