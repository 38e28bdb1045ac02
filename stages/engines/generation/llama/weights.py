"""The weights of a Llama-like model, as decoding reads them.

Llama, SmolLM2, Mistral without its window, Qwen2 and Qwen3 differ in biases and in norms of queries
and keys, no more. A layer's q, k and v are one matrix here, and gate and up another; everything
else is the model's own tensor, not a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from stages.engines.models.lora import has_adapter, named_weights, unwrapped

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Where a position's angles do not depend on how long the sequence is."""


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs besides the weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass
class Layer:
    """One layer; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass
class Weights:
    """A model's weights, layer by layer."""

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


def is_known(model: Any) -> bool:
    """Whether `read_weights` and the decoding over it are right for this model."""
    config = unwrapped(model).config
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = getattr(config, "layer_types", None) or ()
    return (
        config.model_type in FAMILY
        and getattr(config, "quantization_config", None) is None
        and getattr(config, "hidden_act", None) == "silu"
        and getattr(config, "sliding_window", None) is None
        and not set(layer_types) - {"full_attention"}
        and rope.get("rope_type", "default") in ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def read_weights(model: Any) -> Weights:
    """The weights as they are now; of a model under an adapter, merged."""
    plain = unwrapped(model)
    config = plain.config
    named = dict(named_weights(model))
    shape = Shape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=plain.model.layers[0].self_attn.head_dim,
        norm_eps=config.rms_norm_eps,
    )
    embedding = named["model.embed_tokens.weight"]
    return Weights(
        shape,
        embedding,
        list(_layers(named, shape.num_layers)),
        named["model.norm.weight"],
        embedding if config.tie_word_embeddings else named["lm_head.weight"],
    )


def renew(weights: Weights, model: Any) -> None:
    """Bring copies up to date with the model that they were read from, in their places."""
    named = dict(named_weights(model))
    for layer, fresh in zip(weights.layers, _layers(named, weights.shape.num_layers), strict=True):
        for field in fields(Layer):
            _renew(getattr(layer, field.name), getattr(fresh, field.name))
    _renew(weights.embedding, named["model.embed_tokens.weight"])
    _renew(weights.norm, named["model.norm.weight"])
    if weights.head is not weights.embedding:
        _renew(weights.head, named["lm_head.weight"])


def hold_once(weights: Weights, model: Any) -> None:
    """Make the model's q, k, v, gate and up the parts of the joined matrices, not a second copy."""
    assert not has_adapter(model)
    for layer, module in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        for joined, parts in ((layer.qkv, qkv), (layer.gate_up, (mlp.gate_proj, mlp.up_proj))):
            sizes = [part.weight.shape[0] for part in parts]
            for part, rows in zip(parts, torch.split(joined, sizes), strict=True):
                part.weight.data = rows


def rope_tables(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """[length, head_dim] cosines and sines by position, in the type of the weights."""
    plain = unwrapped(model)
    weight = plain.model.embed_tokens.weight
    positions = torch.arange(length, device=weight.device)[None]
    cos, sin = plain.model.rotary_emb(weight[:1, None], positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _layers(named: dict[str, Tensor], num_layers: int) -> Iterator[Layer]:
    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        own = {name: weight for name, weight in named.items() if name.startswith(prefix)}
        yield _layer({name.removeprefix(prefix): weight for name, weight in own.items()})


def _layer(named: dict[str, Tensor]) -> Layer:
    q_k_v = [f"self_attn.{part}_proj" for part in "qkv"]
    gate_up = ["mlp.gate_proj", "mlp.up_proj"]

    def joined_bias(names: list[str]) -> Tensor | None:
        parts = [named[f"{name}.bias"] for name in names if f"{name}.bias" in named]
        return torch.cat(parts) if parts else None

    return Layer(
        attention_norm=named["input_layernorm.weight"],
        qkv=torch.cat([named[f"{name}.weight"] for name in q_k_v]),
        qkv_bias=joined_bias(q_k_v),
        q_norm=named.get("self_attn.q_norm.weight"),
        k_norm=named.get("self_attn.k_norm.weight"),
        o=named["self_attn.o_proj.weight"],
        o_bias=named.get("self_attn.o_proj.bias"),
        mlp_norm=named["post_attention_layernorm.weight"],
        gate_up=torch.cat([named[f"{name}.weight"] for name in gate_up]),
        gate_up_bias=joined_bias(gate_up),
        down=named["mlp.down_proj.weight"],
        down_bias=named.get("mlp.down_proj.bias"),
    )


def _renew(held: Tensor | None, fresh: Tensor | None) -> None:
    if held is not None and fresh is not None and held.data_ptr() != fresh.data_ptr():
        held.copy_(fresh)
