"""Tiny random models of many families, with a tokenizer, as folders that a user might bring."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.data.tokenizer import build_character_tokenizer

TEXT = "0123456789+=;? abcdefghijklmnopqrstuvwxyz"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gpt2": GPT2,
    "gpt_neox": {},
    "gpt_bigcode": {**GPT2, "multi_query": True},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.3},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": False, "alibi": False},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "stablelm": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def write_family(folder: Path, family: str, **changes) -> Path:
    """A folder of a model of the family; its tokenizer has a token for each character."""
    tokenizer = build_character_tokenizer([TEXT])
    options = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **FAMILIES[family],
        **changes,
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
