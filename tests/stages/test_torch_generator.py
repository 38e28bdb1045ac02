"""The torch generator beyond what all generators keep to: families, adapters, resident models."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stages.context import StageError
from stages.contracts.lora import LoraParams
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.engines.generation import generators
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.llama.weights import is_known
from stages.engines.generation.padded import generate as generate_padded
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.folders import content_hash, load_policy
from stages.engines.models.lora import open_for_training

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 16}  # fmt: skip
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases, tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama with long context": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}
OTHERS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_embd": 32, "n_layer": 1, "n_head": 2}),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
}
PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4])
REQUESTS = [Request(PROMPTS[i % 4], seed=1000 + i) for i in range(10)]
OPTIONS = {"max_new_tokens": 16, "sampling": Sampling(temperature=1.3)}


def policy(model_class, config_class, changes):
    torch.manual_seed(0)
    sizes = dict(SIZES)
    if config_class is GPT2Config:
        sizes = {name: sizes[name] for name in SIZES if "token_id" in name or name == "vocab_size"}
    model = model_class(config_class(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight += 0.2 * torch.randn_like(weight)
    return model


def taken(model, slots=3):
    generator = TorchGenerator("cpu", Precision.FLOAT32, slots)
    generator.take(model, content_hash(model))
    return generator


def say(completions):
    return [completion.ids for completion in completions]


def assert_same(answers, expected, bound):
    """The same tokens, and what is noted of them within rounding."""
    assert say(answers) == say(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=bound)
        assert answer.entropy == pytest.approx(other.entropy, abs=10 * bound)
        assert answer.finish_reason == other.finish_reason


@pytest.mark.parametrize("name", [*FAMILY, *OTHERS])
def test_each_family_answers_as_its_own_forward_pass_says(name):
    model = policy(*{**FAMILY, **OTHERS}[name])
    assert is_known(model) == (name in FAMILY)
    answers = taken(model).generate(REQUESTS, **OPTIONS)
    assert_same(answers, generate_padded(model, REQUESTS, **OPTIONS), 1e-5)


@pytest.mark.parametrize("slots", [1, 7, 33, 100])
def test_the_number_of_slots_changes_rounding_alone(slots):
    model = policy(*FAMILY["llama"])
    requests = [Request(PROMPTS[i % 4], seed=i) for i in range(60)]
    options = {"max_new_tokens": 24, "sampling": Sampling(temperature=1.3)}
    answers = taken(model, slots).generate(requests, **options)
    assert_same(answers, generate_padded(model, requests, **options), 1e-4)


def test_eight_tokens_may_end_an_answer_and_a_ninth_is_refused_by_number():
    """Those of the model's config and of an environment together."""
    model = policy(LlamaForCausalLM, LlamaConfig, {"eos_token_id": list(range(2, 7))})
    eight = {**OPTIONS, "sampling": Sampling(1.3, stop_ids=(7, 8, 9))}
    answers = taken(model).generate(REQUESTS, **eight)
    assert_same(answers, generate_padded(model, REQUESTS, **eight), 1e-5)
    assert {answer.ids[-1] for answer in answers} & {7, 8, 9}
    nine = {**OPTIONS, "sampling": Sampling(1.3, stop_ids=(7, 8, 9, 10))}
    said = r"9 tokens end .* \(2, 3, 4, 5, 6, 7, 8, 9, 10\), .*eos_token_id.* rollout\.engine: vllm"
    with pytest.raises(StageError, match=said):
        taken(model).generate(REQUESTS, **nine)


def test_a_model_that_is_not_what_it_says_is_refused():
    model = policy(*FAMILY["llama"])
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    with pytest.raises(StageError, match="from those of a plain forward pass"):
        taken(model).generate(REQUESTS, **OPTIONS)


def test_a_decoder_that_stayed_behind_is_noticed_whenever_weights_are_taken(monkeypatch):
    model = policy(*FAMILY["llama"])
    generator = taken(model)
    generator.generate(REQUESTS, **OPTIONS)
    monkeypatch.setattr(type(generator._decoder), "renew", lambda _: None)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    generator.take(model, content_hash(model))
    with pytest.raises(StageError, match="from those of a plain forward pass"):
        generator.generate(REQUESTS, **OPTIONS)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resident_model_answers_with_its_weights_as_they_change(tmp_path, rank):
    policy(*FAMILY["qwen2"]).save_pretrained(tmp_path)
    model = open_for_training(load_policy, tmp_path, "cpu", LoraParams(rank=rank), 0)
    generator = taken(model)
    first = generator.generate(REQUESTS, **OPTIONS)
    generator.take(model, content_hash(model))
    assert generator.generate(REQUESTS, **OPTIONS) == first
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
    generator.take(model, content_hash(model))
    second = generator.generate(REQUESTS, **OPTIONS)
    model.eval()
    assert say(second) == say(generate_padded(model, REQUESTS, **OPTIONS))
    assert say(second) != say(first)


def test_a_taken_model_is_left_as_it_was():
    model = policy(*FAMILY["llama"])
    before = {
        name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()
    }
    generator = taken(model)
    generator.generate(REQUESTS, **OPTIONS)
    generator.sleep()
    generator.wake()
    generator.close()
    for name, weight in model.named_parameters():
        address, value = before[name]
        assert weight.data_ptr() == address
        assert torch.equal(weight, value)


def test_a_prompt_that_leaves_no_room_is_an_error():
    generator = taken(policy(*FAMILY["llama"]))
    with pytest.raises(StageError, match=r"context of 64: lower rollout\.max_new_tokens"):
        generator.generate([Request([1] * 50, seed=1)], max_new_tokens=15, sampling=Sampling())


def test_the_engine_is_chosen_by_device_size_and_what_is_installed(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(10, 10), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    assert generators.num_weights(tmp_path) == 107

    def choose(engine, device, limit, installed):
        there = object() if installed else None
        monkeypatch.setattr(generators, "find_spec", lambda _: there)
        monkeypatch.setattr(generators, "TORCH_WEIGHTS", limit)
        return generators.choose(tmp_path, device, engine)

    assert choose(Engine.AUTO, "cpu", 106, True) is Engine.TORCH
    assert choose(Engine.AUTO, "cuda", 107, True) is Engine.TORCH
    assert choose(Engine.AUTO, "cuda", 106, True) is Engine.VLLM
    assert choose(Engine.AUTO, "cuda", 106, False) is Engine.TORCH
    assert choose(Engine.VLLM, "cpu", 107, True) is Engine.VLLM
    with pytest.raises(StageError, match=r"rollout\.engine: torch"):
        choose(Engine.VLLM, "cuda", 106, False)
