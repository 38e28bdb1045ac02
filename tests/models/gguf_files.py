"""A tiny Llama as a GGUF file, written as llama.cpp's converter does, with the package's writer."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision
from stages.engines.models.base_folder import take_base_model

CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w"]
TOKENS = [*SPECIAL, *CHARACTERS, "he", "ll", "hell", "Ġw"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
    " }}{% endif %}"
)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTS = {"F32": None, "Q8_0": gguf.GGMLQuantizationType.Q8_0}
FOLDER = ModelParams(source="folder")


def convert(source: Path, target: Path, precision=Precision.FLOAT32, params=FOLDER):
    """As prepare does it."""
    return take_base_model(params, precision, source, target)


def tiny_llama(*, tied: bool = False, context: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    quant: str = "F32",
    extra_tensor: str | None = None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """`metadata`: what the file says besides, or otherwise; None: what it does not say."""
    config = model.config
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    types = [3 if token in SPECIAL else 1 for token in TOKENS]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        _say(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add(writer, _named(name), _as_llama_cpp(name, tensor, config), QUANTS[quant])
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _say(writer, key, value):
    (said,) = writer.kv_data
    said.pop(key, None)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    if value is not None:
        add.get(type(value), writer.add_array)(key, value)


def _add(writer, name, values, quant):
    if quant is None or values.ndim < 2:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, quant), raw_dtype=quant)


def _named(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{IN_LAYER[rest.removesuffix('.weight')]}.weight"


def _as_llama_cpp(name: str, tensor: torch.Tensor, config: LlamaConfig) -> np.ndarray:
    """llama.cpp turns pairs of neighbours; transformers turns the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            rows, columns = tensor.shape
            halves = tensor.view(num_heads, 2, rows // num_heads // 2, columns)
            tensor = halves.transpose(1, 2).reshape(rows, columns)
    return tensor.contiguous().numpy()
