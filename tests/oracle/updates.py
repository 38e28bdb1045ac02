"""Whole updates of TRL's trainers and of ours from the same weights, in float64.

TRL's side is `trainer.train()`: its collator, loss, gradient accumulation, clipping, AdamW and
schedule. The batches that reach its loss are kept. Our side finds their rows among those that TRL
was given, and takes them through the stages' own work and training loop, packed and masked as they
are there, with the optimizer that the params ask for. What is compared are the weights at the end.

Two parts that compute in float32 whatever they are given would hide all that is smaller, and are
exchanged: TRL's fused output head, for a plain log-softmax (shifts, masks and means around it are
TRL's), and the angles of Llama's rotary embeddings, which padding from the left shifts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.context import Context
from stages.contracts.optimizer import Schedule
from stages.engines.training.loop import Plan
from stages.engines.training.schedules import scheduled
from tests.oracle.harness import text, tokenizer
from tests.oracle.trainers import settings

MOST_APART = 1e-10
"""Of a parameter's change over the update, in the 2-norm."""
MICRO_TOKENS = 40
"""So few that a step has several micro-batches, other than TRL's."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Drawn:
    """An optimizer and the shape of an update, at random.

    Adam undoes any factor on its gradients, and so does clipping: a wrong mean would go unseen. The
    epsilon is large, and every other update is not clipped, so that it is seen.
    """

    dice: random.Random
    rows: int
    """In a micro-batch of TRL's."""
    accumulated: int
    """Micro-batches in a step."""
    steps: int
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    adam_epsilon: float
    max_grad_norm: float

    @classmethod
    def by(cls, seed: int) -> "Drawn":
        dice = random.Random(seed)
        return cls(
            dice,
            rows=dice.choice([2, 3, 4]),
            accumulated=dice.choice([1, 2, 3]),
            steps=3,
            learning_rate=dice.uniform(0.01, 0.03),
            weight_decay=dice.uniform(0.1, 0.5),
            beta1=dice.uniform(0.5, 0.9),
            beta2=dice.uniform(0.8, 0.99),
            adam_epsilon=dice.uniform(0.01, 0.1),
            max_grad_norm=0.05 if seed % 2 else 1e6,
        )

    @property
    def num_rows(self) -> int:
        return self.rows * self.accumulated * self.steps

    def words(self, least: int, most: int) -> str:
        return text(self.dice.randrange(10**6), self.dice.randint(least, most))

    def params(self) -> dict[str, float]:
        """The optimizer as our params name it."""
        names = ("learning_rate", "weight_decay", "beta1", "beta2", "adam_epsilon", "max_grad_norm")
        return {name: getattr(self, name) for name in names}

    def trl(self, folder: Path) -> dict[str, Any]:
        """As transformers names it."""
        return {
            **settings(folder, self.rows),
            "gradient_accumulation_steps": self.accumulated,
            "max_steps": self.steps,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "linear",
            "weight_decay": self.weight_decay,
            "adam_beta1": self.beta1,
            "adam_beta2": self.beta2,
            "adam_epsilon": self.adam_epsilon,
            "max_grad_norm": self.max_grad_norm,
        }


def token_ids(words: str) -> list[int]:
    ids: list[int] = tokenizer()(words, add_special_tokens=False)["input_ids"]
    return ids


class PlainHead:
    """In the place of TRL's fused head: log-probs and entropies of whole rows of logits."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        every = (nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        said = every.gather(-1, labels[:, None]).squeeze(-1)
        entropies = -(every.exp() * every).sum(-1).detach()
        return said, entropies, None, entropies, every.argmax(-1) == labels


def angles(rotary: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of LlamaRotaryEmbedding.forward."""
    half = position_ids[..., None].to(x.dtype) * rotary.inv_freq.to(x.dtype)
    both = torch.cat([half, half], dim=-1)
    return both.cos(), both.sin()


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", PlainHead)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", angles)


def trl_update(trainer: Any) -> list[Batch]:
    """Train to the end; the batches that reached the loss, micro-batch by micro-batch."""
    batches: list[Batch] = []
    compute_loss = trainer.compute_loss

    def watched(model: Any, inputs: Batch, *rest: Any, **how: Any) -> Any:
        batches.append(dict(inputs))
        return compute_loss(model, inputs, *rest, **how)

    trainer.compute_loss = watched
    trainer.train()
    return batches


@dataclass(frozen=True)
class Given(Plan):
    """The steps that TRL took, over rows in the order in which it took them."""

    @classmethod
    def of(cls, drawn: Drawn, steps: int) -> "Given":
        size = drawn.rows * drawn.accumulated
        linear = scheduled(Schedule.LINEAR, steps_before=0, warmup=0, decay=steps, floor=0.0)
        return cls(size * steps, size, 1, 0, linear)

    def rows(self, step: int) -> Sequence[int]:
        return range(step * self.batch_size, (step + 1) * self.batch_size)


def a_context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(stage="test", key=None, seed=0, folder=folder, micro_tokens=MICRO_TOKENS)


def apart(start: nn.Module, ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of a parameter, beside how far it has moved."""
    moved = zip(start.named_parameters(), ours.parameters(), theirs.parameters(), strict=True)
    differences = []
    with torch.no_grad():
        for (name, before), mine, other in moved:
            assert before.dtype == mine.dtype == other.dtype == torch.float64
            assert bool((before != other).any()), f"{name} has not learnt"
            differences.append(float((mine - other).norm() / (other - before).norm()))
    return max(differences)
