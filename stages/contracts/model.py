"""Params of the model that everything starts from."""

from typing import Literal

from pydantic import model_validator

from stages.contracts.base import Section


class ModelParams(Section):
    """The base model: built small from these numbers, or read from a folder."""

    source: Literal["build", "folder"] = "build"
    """`build`: a new, small Llama-style model of the sizes below. `folder`: one in `folder`."""
    folder: str = "models"
    """A Hugging Face folder with config, safetensors and tokenizer, or a .gguf file (`folder`)."""
    trust_remote_code: bool = False
    """Whether Python code in the folder may run; if not, a model that has some is refused."""
    chat_template: str | None = None
    """`plain`, `chatml`, or a .jinja file in the folder; null: the tokenizer's own (`folder`)."""
    hidden_size: int = 128
    """Width of the built model."""
    intermediate_size: int = 256
    """Width of the built model's feed-forward layers."""
    num_layers: int = 2
    """Number of layers of the built model."""
    num_heads: int = 2
    """Number of attention heads of the built model."""
    num_kv_heads: int = 1
    """Number of key/value heads of the built model; divides `num_heads`."""
    max_length: int = 48
    """Context length: largest number of tokens of a prompt and its response together."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelParams":
        if min(self.hidden_size, self.num_layers, self.num_heads, self.num_kv_heads) < 1:
            raise ValueError("sizes must be at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )
        return self
