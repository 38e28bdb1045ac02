"""The models and data that speed is measured with: shapes that people use, weights at random.

Time does not depend on what the weights say. The tokenizer has a word for every id, so that peers
that only take text are given the same token ids as we are. Nothing ends a response before its
limit: the model folders name no end-of-sequence token that can be drawn from the benchmark's point
of view, and peers are told to ignore it.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEAN_LENGTH = 221
"""Tokens of a training sequence, on average."""


@dataclass(frozen=True)
class RlStep:
    """The fixed work of a step."""

    num_prompts: int = 64
    num_samples: int = 8
    new_tokens: int = 256

    @property
    def num_responses(self) -> int:
        return self.num_prompts * self.num_samples


RL_STEP = {"tiny": RlStep(num_prompts=2, new_tokens=16)}
"""Of shapes that have one of their own."""
SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2-135M: 30 narrow layers under a large, tied vocabulary.
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    # TinyLlama-1.1B.
    "1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    # Llama-2-7B's sizes with the grouped keys and values of newer ones.
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    # Llama 3.1 8B.
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    # For ranks that share a machine without a GPU.
    "10m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    # For a machine without a GPU, to see that a script runs.
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
PAD, END = 0, 1
FIRST_WORD = 2
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Sequences:
    """Prompts and two responses to each, as token ids."""

    prompts: list[list[int]]
    chosen: list[list[int]]
    rejected: list[list[int]]


def sequences(shape: str, count: int, seed: int = 17, prompt_length: int = 25) -> Sequences:
    """Uneven lengths: log-normal around MEAN_LENGTH for a prompt and its response together.

    A row does not depend on how many there are: who takes fewer has the first ones of the others.
    """
    words = range(FIRST_WORD, SHAPES[shape]["vocab_size"])
    mean = prompt_length + 20 if shape == "tiny" else MEAN_LENGTH

    def row(number: int) -> tuple[list[int], list[int], list[int]]:
        draw = random.Random(f"{seed} {number}")

        def response() -> list[int]:
            length = draw.lognormvariate(math.log(mean - prompt_length) - 0.18, 0.6)
            return draw.choices(words, k=min(max(8, round(length)), 1000))

        return draw.choices(words, k=draw.randint(20, 30)), response(), response()

    prompts, chosen, rejected = zip(*(row(number) for number in range(count)), strict=True)
    return Sequences(list(prompts), list(chosen), list(rejected))


def rl_step(shape: str) -> RlStep:
    return RL_STEP.get(shape, RlStep())


def text(ids: list[int]) -> str:
    """What the benchmark's tokenizer turns into these very ids."""
    return " ".join(f"w{token}" for token in ids)


def make_model(shape: str, folder: Path, *, weights: bool = True, dtype: str = "float32") -> None:
    """A Hugging Face folder with weights at random, and a tokenizer of numbered words.

    Without weights it is a folder for `load_at_random`.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig

    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
        initializer_range=0.02,
    )
    if weights:
        _at_random(config).to(getattr(torch, dtype)).save_pretrained(folder)
        torch.cuda.empty_cache()  # others will measure on the same GPU
    else:
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    make_tokenizer(SHAPES[shape]["vocab_size"], folder)


def load_at_random(folder: Path, device: str = "cpu", precision: Any = None) -> Any:
    """In place of `load_policy`, for weights that the disk has no room for.

    The model that the folder describes, always with the same weights.
    """
    from transformers import LlamaConfig

    from stages.engines.models.precision import round_weights

    model = _at_random(LlamaConfig.from_pretrained(folder))
    if precision is not None:
        round_weights(model, precision)
    return model.to(device).eval()


def _at_random(config: Any) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config).to(torch.float32)


def make_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<end>"] + [f"w{token}" for token in range(FIRST_WORD, vocab_size)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "<pad>",
                "eos_token": "<end>",
                "model_max_length": MAX_LENGTH,
            }
        ),
        encoding="utf-8",
    )
