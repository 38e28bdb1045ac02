"""Adapters: what learns, what is saved, and what other tools and later iterations make of it."""

import json
import os
import subprocess
import sys
from functools import reduce
from operator import add, mul
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from stages.context import StageError
from stages.contracts.lora import LoraParams, LoraSave
from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.scalars import response_values, sequence_rewards
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.padded import generate
from stages.engines.models.folders import (
    content_hash,
    end_ids,
    load_policy,
    load_scalar_model,
    pad_id,
    save_model,
    start_scalar_model,
)
from stages.engines.models.lora import (
    carries_moments,
    is_adapter_folder,
    open_for_training,
    with_adapter,
)
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from stages.engines.training.sampled import sampled_weights
from stages.engines.training.saving import sampling_hash, save_learner
from tests.stages.conftest import everything

MERGED = LoraParams(rank=3, alpha=6.0)
ADAPTER = LoraParams(rank=3, alpha=6.0, save=LoraSave.ADAPTER)
BATCH = collate([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], pad_id=0)
IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def write_base(folder: Path, *, tied: bool = False) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    # Some weights of either sign of zero: no bit of them may change.
    model.model.layers[0].mlp.up_proj.weight.data[:2] = torch.tensor([[0.0], [-0.0]])
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "policy")


def opened(base, lora=ADAPTER, load=load_policy, seed=1):
    return open_for_training(load, base, "cpu", lora, seed=seed)


def learnt_adapter(base, folder):
    """A policy with an adapter that has learnt, and is saved as one in the folder."""
    policy = opened(base)
    learn(policy)
    save_model(policy, folder, tokenizer_from=base, lora=ADAPTER)
    return policy


def learn(model, learner=None, *, steps=2, scalar=False):
    """A few steps towards likelier responses, or towards values of one."""
    learner = learner or Learner(model, Optimization(learning_rate=0.05, max_grad_norm=1.0))
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        if scalar:
            loss = (response_values(model, BATCH) - 1).square().sum()
        else:
            loss = -response_logprobs(model, BATCH, 1.0).logprobs.sum()
        loss.backward()
        learner.clip_gradients()
        learner.step(1.0)
    model.eval()
    return learner


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_only_the_adapter_learns(base):
    before = load_file(base / "model.safetensors")
    policy = opened(base, MERGED)
    start = {name: value.clone() for name, value in policy.named_parameters()}
    learner = learn(policy)
    changed = {n for n, value in policy.named_parameters() if not torch.equal(value, start[n])}
    assert changed == {name for name in start if ".lora_" in name}
    assert len(changed) == 2 * 2 * 7  # A and B of each linear layer but the head
    moments = ("exp_avg", "exp_avg_sq", "step")
    kinds = ["weight", *(f"moment.{moment}" for moment in moments)]
    assert set(learner.held()) == {f"{kind}.{name}" for kind in kinds for name in changed}
    frozen = {n: v for n, v in policy.named_parameters() if ".lora_" not in n}
    assert len(frozen) == len(before)


def test_a_scalar_model_learns_its_head_too(base):
    critic = opened(base, MERGED, start_scalar_model)
    start = {name: value.clone() for name, value in critic.named_parameters()}
    # From a head of zeros: the head learns first, then B, then A.
    learn(critic, scalar=True, steps=3)
    changed = {n for n, value in critic.named_parameters() if not torch.equal(value, start[n])}
    assert changed == {n for n in start if ".lora_" in n or "modules_to_save" in n}
    assert any("score" in name for name in changed)


def test_a_fresh_adapter_changes_no_bit_of_the_model(base):
    plain = load_policy(base)
    policy = opened(base, MERGED)
    assert content_hash(policy) == content_hash(plain)
    assert torch.equal(logits(policy), logits(plain))
    assert not policy.training
    assert (end_ids(policy), pad_id(policy)) == (end_ids(plain), pad_id(plain))
    requests = [Request([3, 4], seed=5)]
    options = {"max_new_tokens": 5, "sampling": Sampling()}
    assert generate(policy, requests, **options) == generate(plain, requests, **options)


def test_without_a_rank_all_weights_learn(base):
    policy = opened(base, LoraParams())
    assert type(policy) is type(load_policy(base))
    assert all(parameter.requires_grad for parameter in policy.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_are_the_base_and_the_scaled_product(tmp_path, tied):
    base = write_base(tmp_path / "policy", tied=tied)
    policy = opened(base, MERGED)
    learn(policy)
    save_model(policy, tmp_path / "merged", tokenizer_from=base)
    assert set(contents(tmp_path / "merged")) == set(contents(base))

    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    weights = {name: value.detach().double() for name, value in policy.named_parameters()}
    num_merged = 0
    for name, value in before.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.default.weight" not in weights:
            assert torch.equal(after[name], value)
            continue
        a, b = (weights[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        expected = value.double() + (6.0 / 3) * b @ a
        assert not torch.equal(after[name], value)
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-6)
        num_merged += 1
    assert num_merged == 14

    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(elsewhere), logits(policy), rtol=1e-5, atol=1e-5)
    assert elsewhere.config.use_cache
    assert content_hash(load_policy(tmp_path / "merged")) == content_hash(policy)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_folder_loads_merged(tmp_path, tied):
    base = write_base(tmp_path / "policy", tied=tied)
    folder = tmp_path / "adapter"
    policy = learnt_adapter(base, folder)
    assert is_adapter_folder(folder)
    assert (folder / "tokenizer.json").exists()
    of_base = {name: data for name, data in contents(base).items() if name != "tokenizer.json"}
    assert contents(folder / "base") == of_base

    loaded = load_policy(folder)
    assert type(loaded) is LlamaForCausalLM
    assert content_hash(loaded) == content_hash(policy)
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(loaded), logits(load_policy(base)), atol=0.1)


def test_peft_itself_loads_an_adapter_folder_anywhere(base, tmp_path, monkeypatch):
    from peft import PeftModel

    policy = learnt_adapter(base, tmp_path / "adapter")
    folder = (tmp_path / "adapter").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), folder
    )
    # Not bit for bit: MKL may round by how weights are aligned, and a file's are so otherwise.
    torch.testing.assert_close(logits(theirs), logits(policy), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        logits(theirs.merge_and_unload()), logits(load_policy(folder)), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("lora", [MERGED, ADAPTER], ids=["merged", "adapter"])
def test_a_scalar_model_keeps_its_head(base, tmp_path, lora):
    critic = opened(base, lora, start_scalar_model)
    learn(critic, scalar=True)
    folder = tmp_path / "critic"
    save_model(critic, folder, tokenizer_from=base, lora=lora)
    loaded = load_scalar_model(folder)
    assert content_hash(loaded) == content_hash(critic)
    with torch.no_grad():
        rewards = sequence_rewards(critic, BATCH)
        assert rewards.abs().min() > 0.01
        torch.testing.assert_close(sequence_rewards(loaded, BATCH), rewards, rtol=1e-5, atol=1e-5)
    if lora is MERGED:
        elsewhere = AutoModelForSequenceClassification.from_pretrained(folder)
        assert torch.equal(elsewhere.score.weight, loaded.score.weight)


@pytest.mark.parametrize("scalar", [False, True], ids=["policy", "critic"])
def test_going_on_from_an_adapter_folder_equals_not_having_stopped(base, tmp_path, scalar):
    lora = LoraParams(rank=3, alpha=6.0, dropout=0.2, save=LoraSave.ADAPTER)
    load, start = (load_scalar_model, start_scalar_model) if scalar else (load_policy, load_policy)
    model = opened(base, lora, start)
    learner = learn(model, scalar=scalar)
    save_model(model, tmp_path / "half", tokenizer_from=base, lora=lora)
    moments = {n: one for n, one in everything(learner).items() if n.startswith("moment.")}
    learn(model, learner, scalar=scalar)
    save_model(model, tmp_path / "whole", tokenizer_from=base, lora=lora)

    assert carries_moments(lora, tmp_path / "half")
    again = opened(tmp_path / "half", lora, load, seed=99)
    learner = Learner(again, Optimization(learning_rate=0.05, max_grad_norm=1.0))
    learner.load(moments)
    learn(again, learner, scalar=scalar)
    save_model(again, tmp_path / "again", tokenizer_from=tmp_path / "half", lora=lora)
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


def test_an_adapter_folder_may_be_the_base_of_a_fresh_adapter_or_of_none(base, tmp_path):
    policy = learnt_adapter(base, tmp_path / "adapter")
    merged = content_hash(policy)

    fresh = opened(tmp_path / "adapter", MERGED)
    assert content_hash(fresh) == merged
    assert not any(value.any() for name, value in fresh.named_parameters() if "lora_B" in name)
    full = opened(tmp_path / "adapter", LoraParams())
    assert content_hash(full) == merged
    # A critic that starts from the policy: the merged backbone, an adapter and a head of its own.
    critic = opened(tmp_path / "adapter", ADAPTER, start_scalar_model)
    backbone = load_policy(tmp_path / "adapter").model
    assert content_hash(start_scalar_model(tmp_path / "adapter")) == content_hash(critic)
    torch.testing.assert_close(
        critic.get_base_model().model(input_ids=IDS).last_hidden_state,
        backbone(input_ids=IDS).last_hidden_state,
    )
    assert not any(value.any() for name, value in critic.named_parameters() if "lora_B" in name)


def test_moments_are_carried_only_where_the_same_weights_learn(base, tmp_path):
    policy = opened(base)
    save_model(policy, tmp_path / "adapter", tokenizer_from=base, lora=ADAPTER)
    assert carries_moments(LoraParams(), base)
    assert not carries_moments(MERGED, base)
    assert not carries_moments(ADAPTER, base)
    assert carries_moments(ADAPTER, tmp_path / "adapter")
    assert not carries_moments(MERGED, tmp_path / "adapter")
    assert not carries_moments(LoraParams(), tmp_path / "adapter")


@pytest.mark.parametrize("change", [{"rank": 2}, {"alpha": 7.0}, {"targets": ["q_proj"]}])
def test_another_adapter_than_the_folders_is_refused(base, tmp_path, change):
    policy = opened(base)
    save_model(policy, tmp_path / "adapter", tokenizer_from=base, lora=ADAPTER)
    other = ADAPTER.model_copy(update=change)
    with pytest.raises(StageError, match=r"rank 3, alpha 6\.0"):
        opened(tmp_path / "adapter", other)


def test_named_layers_alone_get_an_adapter(base):
    lora = LoraParams(rank=2, targets=["q_proj", "v_proj"])
    policy = opened(base, lora)
    learning = {name.split(".")[-4] for name, p in policy.named_parameters() if p.requires_grad}
    assert learning == {"q_proj", "v_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "no_such_layer"])
def test_a_target_that_can_take_no_adapter_is_refused(base, target):
    lora = LoraParams(rank=2, targets=["q_proj", target] if target != "no_such_layer" else [target])
    with pytest.raises(StageError, match=f"lora.targets.*{target}"):
        opened(base, lora)


def merged_by_hand(before, a, b, scaling):
    """By Python's own floats, added up rank by rank."""
    columns = list(zip(*a.tolist(), strict=True))
    return torch.tensor(
        [
            [
                old + scaling * reduce(add, map(mul, of_row, column))
                for old, column in zip(row, columns, strict=True)
            ]
            for row, of_row in zip(before.tolist(), b.tolist(), strict=True)
        ],
        dtype=torch.float64,
    ).float()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_a_merged_weight_depend_on_its_numbers_alone(transposed, monkeypatch):
    monkeypatch.setattr("stages.engines.models.lora._NUMBERS", 16)  # several pieces
    torch.manual_seed(0)
    before, a, b = torch.randn(7, 5), torch.randn(6, 5), torch.randn(7, 6)
    stored = before.T if transposed else before
    merged = with_adapter(stored, a, b, 0.3, transposed=transposed)
    assert torch.equal(merged.T if transposed else merged, merged_by_hand(before, a, b, 0.3))


def assert_sampled_as_loaded(base, folder, device, precision):
    """What a sampler is given, and what it would load of the folder that it is saved to."""
    policy = open_for_training(load_policy, base, device, ADAPTER, seed=1)
    learner = Learner(policy, Optimization(0.05, max_grad_norm=1.0, precision=precision))
    for name, weight in learner.named_parameters():
        drawn = torch.Generator().manual_seed(len(name))
        weight.data.copy_(torch.randn(weight.shape, generator=drawn))
    learner.load({})
    save_learner(learner, folder, tokenizer_from=base, lora=ADAPTER)
    loaded = load_policy(folder, device, precision)
    assert content_hash(loaded) == content_hash(load_policy(folder, "cpu", precision))
    assert content_hash(loaded) == sampling_hash(learner)
    sampled = dict(sampled_weights(learner))
    assert sampled.keys() == dict(loaded.named_parameters()).keys()
    for name, weight in loaded.named_parameters():
        assert (weight.dtype, weight.device) == (sampled[name].dtype, sampled[name].device)
        assert torch.equal(weight, sampled[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", Precision)
def test_a_sampler_is_given_what_it_would_load(tmp_path, tied, precision):
    base = write_base(tmp_path / "policy", tied=tied)
    assert_sampled_as_loaded(base, tmp_path / "adapter", "cpu", precision)


def test_a_layer_that_keeps_its_weight_transposed_is_merged_right(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    policy = open_for_training(load_policy, tmp_path / "base", "cpu", ADAPTER, seed=1)
    learn(policy)
    save_model(policy, tmp_path / "adapter", tokenizer_from=tmp_path / "base", lora=ADAPTER)
    loaded = load_policy(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-4, atol=1e-4)
    square = "transformer.h.0.attn.c_proj.weight"
    assert not torch.equal(
        loaded.state_dict()[square], load_file(tmp_path / "base/model.safetensors")[square]
    )


SCRIPT = """
import sys
from pathlib import Path
from stages.contracts.lora import LoraParams
from stages.engines.models.lora import open_for_training
from stages.engines.models.folders import load_policy, save_model

base, out = map(Path, sys.argv[1:])
lora = LoraParams(rank=3, alpha=6.0, save="adapter")
policy = open_for_training(load_policy, base, "cpu", lora, seed=1)
save_model(policy, out, tokenizer_from=base, lora=lora)
"""


def test_an_adapter_folder_has_the_same_bytes_in_every_process_and_place(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    torch.rand(5)  # where this process's own random numbers are does not matter
    policy = opened(write_base(here / "base"))
    save_model(policy, here / "out", tokenizer_from=here / "base", lora=ADAPTER)

    command = [sys.executable, "-c", SCRIPT, str(write_base(there / "base")), str(there / "out")]
    environment = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)

    files = contents(here / "out")
    assert files == contents(there / "out")
    assert not any(str(tmp_path).encode() in data for data in files.values())
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "base"


def test_a_seed_draws_the_adapter_and_leaves_other_random_numbers_alone(base):
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(5)
        policy = opened(base, MERGED, seed=seed)
        drawn.append([v.clone() for n, v in policy.named_parameters() if "lora_A" in n])
        after = torch.rand(3)
        torch.manual_seed(5)
        load_policy(base)
        assert torch.equal(after, torch.rand(3))
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not any(map(torch.equal, drawn[0], drawn[2]))
