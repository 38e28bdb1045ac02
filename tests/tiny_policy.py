"""Policies of a few thousand random weights that answer, and a clone that has recorded two."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from stages.data.tokenizer import EOS, build_character_tokenizer
from tests.control.recorded_policies import GRAPH, Recorded

CHARACTERS = "0123456789+=?abcdefghijklmnopqrstuvwxyz <>/()'\"!\n"
CONTEXT, LONG_CONTEXT = 512, 1 << 15
TALKATIVE, BRIEF = 3, 1
"""Seeds of weights: one that greedily never ends, and one that ends after a while."""


def tiny_policy(
    folder: Path,
    seed: int = TALKATIVE,
    *,
    windowed: bool = False,
    template: bool = True,
    words: Mapping[str, str] | None = None,
    context: int = CONTEXT,
    head_dim: int = 16,
) -> Path:
    """A policy's folder; with a sliding window it is decoded in padded batches.

    `words`: what it says in place of a character.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_character_tokenizer([CHARACTERS])
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    known = parts["model"]["vocab"].items()
    parts["model"]["vocab"] = {(words or {}).get(token, token): i for token, i in known}
    path.write_text(json.dumps(parts))
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids(EOS),
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    if windowed:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    return folder


def chat_clone(root: Path, words: Mapping[str, str] | None = None) -> Recorded:
    """A clone with the policies `sft` and `iter_001`; at the tag `first`, iter_001 is another."""
    clone = Recorded(root)
    (root / "dvc.yaml").write_text(GRAPH.partition("  evaluate_sft:")[0])
    tiny_policy(root / "artifacts/policies/sft/model", words=words, context=LONG_CONTEXT)
    for seed, rate, tag in ((0, 0.1, "first"), (BRIEF, 0.2, None)):
        tiny_policy(root / "artifacts/policies/iter_001/model", seed)
        clone.params(rate, "iter_001")
        clone.record(f"learning rate {rate}", tag)
    return clone
