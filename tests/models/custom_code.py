"""A model whose classes transformers does not have: the files that such a folder brings."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.data.tokenizer import build_character_tokenizer
from tests.models.families import TEXT

CONFIGURATION = """
from transformers import PretrainedConfig


class EchoConfig(PretrainedConfig):
    model_type = "echo"

    def __init__(self, vocab_size=50, hidden_size=16, **options):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1
        super().__init__(**options)
"""
MODELING = """
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_echo import EchoConfig


class EchoModel(PreTrainedModel):
    config_class = EchoConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **_):
        told = self.embedding(input_ids)
        if attention_mask is not None and past_key_values is None:
            told = told * attention_mask[:, -told.shape[1]:, None]
        total = told.cumsum(1)
        if past_key_values is not None:
            total = total + past_key_values
        return BaseModelOutputWithPast(
            last_hidden_state=torch.tanh(self.mix(total)), past_key_values=total[:, -1:]
        )


class EchoForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = EchoConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = EchoModel(config)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, logits_to_keep=0, **options):
        out = self.model(input_ids, **options)
        hidden = out.last_hidden_state[:, -logits_to_keep:]
        return CausalLMOutputWithPast(
            logits=self.head(hidden), past_key_values=out.past_key_values
        )
"""


def write_echo(folder: Path) -> Path:
    """A recurrent model of its own kind."""
    tokenizer = build_character_tokenizer([TEXT])
    tokenizer.save_pretrained(folder)
    (folder / "configuration_echo.py").write_text(CONFIGURATION)
    (folder / "modeling_echo.py").write_text(MODELING)
    config = {
        "model_type": "echo",
        "architectures": ["EchoForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_echo.EchoConfig",
            "AutoModelForCausalLM": "modeling_echo.EchoForCausalLM",
        },
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {
        "model.embedding.weight": torch.randn(len(tokenizer), 16),
        "model.mix.weight": torch.randn(16, 16) * 0.3,
        "model.mix.bias": torch.randn(16),
        "head.weight": torch.randn(len(tokenizer), 16),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
