"""The same tiny models, words and batches for both sides, and how far apart two losses are.

TRL's side is its real trainer: it tokenizes our text, collates the batch and computes the loss. Our
side runs the same model on that batch, takes a plain log-softmax, and calls our loss with the
counts of the batch. Both then go backward, and every parameter's gradient is compared.

Float32, as TRL's fused head computes in nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TOLERANCE = 1e-5
WORDS = [f"w{n}" for n in range(36)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


@dataclass(frozen=True)
class Difference:
    """Our loss beside TRL's on one batch."""

    ours: float
    trl: float
    loss: float | None
    """The relative difference of the two; None where they are not meant to be equal."""
    gradient: float | None
    """The largest relative difference of a parameter's gradient, in the 2-norm; None without."""

    def check(self) -> None:
        """Fail where the two differ by more than rounding."""
        assert self.loss is None or self.loss <= TOLERANCE, f"{self.ours} is not {self.trl}"
        assert self.gradient is None or self.gradient <= TOLERANCE, f"gradients: {self.gradient}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def _config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
        **changes,
    )


def policy(seed: int = 0, noise: float = 0.0, **changes: Any) -> LlamaForCausalLM:
    """A policy that is far from uniform; `noise` moves it away from the one without."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(**changes))
    return _moved(model, noise)


def reward_model(seed: int = 0, **changes: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(_config(**changes))


def _moved(model: LlamaForCausalLM, noise: float) -> LlamaForCausalLM:
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    return model


def text(seed: int, length: int) -> str:
    """Words at random, the same for the same seed."""
    draws = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[draw] for draw in draws.tolist())


def pairs() -> list[dict[str, str]]:
    """Prompts with a better and a worse response, all of uneven lengths."""
    shapes = [(3, 4, 6), (5, 7, 2), (2, 3, 3), (4, 6, 5)]
    return [
        {
            "prompt": text(10 * row, prompt),
            "chosen": " " + text(10 * row + 1, chosen) + " </s>",
            "rejected": " " + text(10 * row + 2, rejected) + " </s>",
        }
        for row, (prompt, chosen, rejected) in enumerate(shapes)
    ]


def label_logprobs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, T-1] log-probs of each token after the first, without any of TRL's code."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def difference(
    model: nn.Module, ours: Callable[[], Tensor], trl: Callable[[], Tensor]
) -> Difference:
    """Both losses and their gradients by the parameters of `model`."""
    our_loss, our_gradients = _backward(model, ours)
    trl_loss, trl_gradients = _backward(model, trl)
    apart = [
        float((mine - theirs).norm() / theirs.norm())
        for mine, theirs in zip(our_gradients, trl_gradients, strict=True)
    ]
    return Difference(
        our_loss, trl_loss, abs(our_loss - trl_loss) / max(abs(trl_loss), 1e-12), max(apart)
    )


def of_values(ours: Tensor, trl: Tensor) -> Difference:
    """Of numbers that are no losses: their norms stand for losses."""
    apart = float((ours - trl).norm() / trl.norm())
    return Difference(float(ours.norm()), float(trl.norm()), apart, None)


def _backward(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    return float(value.detach()), [gradient.double() for gradient in _gradients(model)]


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"nothing reaches {name}"
        yield weight.grad
