"""A tiny model of the Llama family and rows to train it on, made of a seed alone.

Nothing is downloaded, and every rank and every machine makes the same rows.
"""

import random
from pathlib import Path

import torch

from stages.engines.models.lean_transformers import AutoConfig, AutoModelForCausalLM, hidden

VOCABULARY = 256
CONTEXT = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Heads of 64 numbers, because some kernels know no smaller ones."""

TokenIds = list[int]


def build_base(folder: Path) -> None:
    """A folder with the model, as the base of a pipeline would be."""
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Transformers would import DeepSpeed here, for seconds, to ask whether this is its model.
    with hidden(("deepspeed",)):
        model.save_pretrained(folder)


def make_rows(num_rows: int) -> tuple[list[TokenIds], list[TokenIds]]:
    """Prompts, and completions to learn."""
    draw = random.Random(7)

    def sequence(shortest: int, longest: int) -> TokenIds:
        return [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(shortest, longest))]

    prompts = [sequence(4, 12) for _ in range(num_rows)]
    return prompts, [[*sequence(4, 24), 2] for _ in range(num_rows)]
