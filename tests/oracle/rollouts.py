"""The same responses and rewards for both sides, and a policy that has moved since it sampled."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stages.algorithms.loss import Tokens
from tests.oracle.harness import label_logprobs, policy, text, tokenizer

GROUP = 4
LENGTHS = [4, 2, 6, 1, 3, 7, 5, 2, 4, 4, 3, 6]
MAX_LENGTH = 8
REWARDS = [1.0, 0.0, 2.0, 0.5, 0.0, 0.3, 1.0, 3.0, 0.5, 0.5, 0.5, 0.5]
"""Of three groups; the last one's are all equal."""
PROMPTS = [{"prompt": text(100 + n, 2 + n)} for n in range(len(LENGTHS) // GROUP)]


def responses() -> list[list[int]]:
    """Token ids of uneven length."""
    words = tokenizer()
    return [
        words(text(200 + n, length), add_special_tokens=False)["input_ids"]
        for n, length in enumerate(LENGTHS)
    ]


def own_tokens() -> list[list[int]]:
    """1 for what the policy said itself, 0 for what was put into its response from outside."""
    return [[0 if length > 3 and n == 1 else 1 for n in range(length)] for length in LENGTHS]


def sampler_logprobs() -> list[list[float]]:
    """Far enough from any policy's that importance weights go past their bounds."""
    noise = torch.Generator().manual_seed(3)
    return [(-4.5 + torch.randn(length, generator=noise)).tolist() for length in LENGTHS]


def sampling_policy(reference: Path) -> nn.Module:
    """The policy that samples; its configuration names the folder of a reference beside it."""
    policy().save_pretrained(reference)
    model = policy(noise=0.1)
    model.config._name_or_path = str(reference)
    return model


def move(model: nn.Module) -> None:
    """The update between sampling and the loss, so that ratios are not all 1."""
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=noise)


@dataclass(frozen=True)
class Responses:
    """A micro-batch of TRL's, as our losses want it."""

    input_ids: Tensor
    attention_mask: Tensor
    tokens: Tokens

    @classmethod
    def of(cls, batch: dict[str, Tensor]) -> "Responses":
        own = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
        return cls(
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            Tokens.padded(batch["completion_mask"] * own),
        )

    def logprobs(self, model: nn.Module) -> Tensor:
        """[B, T] of the response tokens."""
        length = self.tokens.mask.shape[1]
        return label_logprobs(model, self.input_ids, self.attention_mask)[:, -length:]
