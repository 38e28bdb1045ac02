"""The sizes of a decoder that memory depends on, from its config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contracts.model import ModelParams

UNGATED = (
    *("gpt2", "gptj", "gpt_neox", "opt", "phi", "falcon", "bloom", "starcoder2"),
    *("bert", "roberta", "xlm-roberta", "electra", "deberta-v2"),
)
"""Families whose feed-forward layer has two matrices; all others have three."""
REARRANGED = (
    *("mixtral", "minimax", "minimax_m2", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "ernie4_5_moe"),
    *("granitemoe", "jamba"),
)
"""Families whose weights are not in memory as they are in files, which have experts one by one."""
TIED = ("gpt2", "opt", "falcon", "bloom", "gemma", "gemma2", "gemma3_text")
"""Families whose output head is the embedding unless the config says otherwise."""
BUILT_VOCABULARY = 256
"""Of a model that is built here, before its tokenizer has counted characters."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder. Of a mixture of experts, `inner` counts the experts that one token meets."""

    width: int
    inner: int
    """Width of the feed-forward layer."""
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Numbers of one attention head."""
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding."""
    layer_weights: int
    """Of one layer, on average."""
    float32: bool = True
    """Whether its files hold float32, as those have that a stage has written."""
    by_rows: bool = True
    """Whether the ranks that it is spread over can each read their rows of the files."""
    classifier: bool = False
    """Whether it comes with the head of a sequence classifier."""

    @property
    def weights(self) -> int:
        return self.backbone + (0 if self.tied else self.vocabulary * self.width)

    @property
    def backbone(self) -> int:
        """Without an output head of its own."""
        return self.vocabulary * self.width + self.layers * self.layer_weights + self.width

    @property
    def q_width(self) -> int:
        return self.heads * self.head

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head

    @property
    def cached_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_width

    @property
    def joined_weights(self) -> int:
        """Those that decoding joins: q with k and v, gate with up."""
        return self.layers * self.width * (self.q_width + 2 * self.kv_width + 2 * self.inner)

    def adapter_weights(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Of a LoRA adapter beside these linear layers; without names, beside all."""
        sides = {
            "q_proj": self.width + self.q_width,
            "k_proj": self.width + self.kv_width,
            "v_proj": self.width + self.kv_width,
            "o_proj": self.q_width + self.width,
            "gate_proj": self.width + self.inner,
            "up_proj": self.width + self.inner,
            "down_proj": self.inner + self.width,
        }
        named = [name.rsplit(".", 1)[-1] for name in targets]
        known = [name for name in named if name in sides]
        chosen = known if known and len(known) == len(named) else list(sides)
        return self.layers * rank * sum(sides[name] for name in chosen)


def decoder(
    width: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    head: int | None = None,
    tied: bool = False,
    float32: bool = True,
) -> ModelShape:
    """A dense one with a gated feed-forward layer, as Llama, Mistral and Qwen are."""
    return shape_of(
        {
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "dtype": "float32" if float32 else "bfloat16",
        }
    )


def read_shape(folder: Path) -> ModelShape | None:
    """Of the model in a folder, or of the base beside an adapter; None if it cannot be told."""
    for path in (folder / "config.json", folder / "base" / "config.json"):
        try:
            return shape_of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def built_shape(params: ModelParams, vocabulary: int = BUILT_VOCABULARY) -> ModelShape:
    """Of the model that prepare builds."""
    sizes = (params.hidden_size, params.intermediate_size, params.num_layers)
    return decoder(*sizes, params.num_heads, params.num_kv_heads, vocabulary)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """KeyError names a size that the config lacks."""
    family = config.get("model_type", "")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    text = config.get("text_config") or config
    width = _first(text, "hidden_size", "n_embd", "d_model")
    heads = _first(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    head = text.get("head_dim") or width // heads
    attention = 2 * width * heads * head + 2 * width * kv_heads * head
    matrices = 2 if family in UNGATED else 3
    inner = text.get("intermediate_size") or text.get("n_inner") or text.get("ffn_dim") or 4 * width
    experts = next((text[k] for k in EXPERTS if text.get(k)), 0)
    meeting = inner
    stored_inner = inner
    if experts:
        each = text.get("moe_intermediate_size") or inner
        shared = text.get("shared_expert_intermediate_size") or 0
        meeting = each * text.get("num_experts_per_tok", 1) + shared
        stored_inner = each * experts + shared
    return ModelShape(
        width=width,
        inner=meeting,
        layers=_first(text, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        vocabulary=_first(text, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family in TIED)),
        layer_weights=attention + matrices * width * stored_inner + width * (experts + 2),
        float32=stored == "float32",
        by_rows=family not in REARRANGED,
        classifier=any(
            str(name).endswith("ForSequenceClassification")
            for name in config.get("architectures") or ()
        ),
    )


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts in a layer."""


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])
