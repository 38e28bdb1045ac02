"""The protocol of a learner: a model with its optimizer, on one GPU or spread over many.

optimizer.py has the learner of a process that holds all of it, fsdp.py and zero.py have those that
spread it over the ranks. Each gives out weights and moments by parameter, whole and in float32, one
at a time, to whichever rank writes it: a checkpoint, or the state that an iteration leaves, fits
any learner, on any number of ranks.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.contracts.precision import Precision
from stages.engines.models.tensor_files import Form, StoredTensor
from stages.engines.processes.ranks import Ranks

NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Parameters that transformers' Trainer and TRL spare, by their lower-case names."""


@dataclass(frozen=True)
class Optimization:
    """Optimizer settings: AdamW, gradient clipping, moving average of the weights."""

    learning_rate: float
    max_grad_norm: float
    weight_decay: float = 0.0
    decay_norms_and_biases: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    ema_decay: float = 0.0
    precision: Precision = Precision.FLOAT32

    def adamw(
        self, model: Any, weights: Mapping[str, Tensor], device: torch.device
    ) -> torch.optim.AdamW:
        """Of these weights, by their names in the model; those that do not decay are a group."""
        spared: set[str] = set()
        if self.weight_decay and not self.decay_norms_and_biases:
            spared = norms_and_biases(model)
        decaying = [weight for name, weight in weights.items() if name not in spared]
        steady = [weight for name, weight in weights.items() if name in spared]
        groups = ({"params": decaying}, {"params": steady, "weight_decay": 0.0})
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            fused=device.type == "cuda",
        )


def norms_and_biases(model: Any) -> set[str]:
    """The names of a model's parameters that weight decay usually spares."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, torch.nn.LayerNorm) or NORM_OR_BIAS.search(f"{path}.{name}".lower())
    }


class AnyLearner(Protocol):
    """One model with its optimizer.

    Where several ranks train, all of them call a method that says so, at the same point.
    """

    model: Any
    precision: Precision
    """What the model computes in."""
    lockstep: bool
    """Whether every pass through the model is a collective: all ranks have to make as many."""

    def before_backward(self) -> float:
        """Get ready for the backward pass of a loss; what the loss has to be multiplied by."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Trainable parameters with their gradients; none where these are spread over the ranks."""

    def sum_gradients(self, ranks: Ranks) -> None:
        """Add up the ranks' gradients; all ranks."""

    def clip_gradients(self) -> float:
        """Clip the gradients to the largest norm; returns the norm before that. All ranks."""

    def step(self, factor: float) -> None:
        """One optimizer step at `factor` times the learning rate; all ranks."""

    def settle(self) -> None:
        """Replace the weights by their moving average, where there is one; all ranks."""

    def weights_not_finite(self) -> list[str]:
        """The names of weights, as far as this rank has them, with numbers that are not finite."""

    def held(self) -> Mapping[str, Form]:
        """The tensors that it has now, as they are when whole; the same on every rank.

        `weight.NAME` is a float32 weight that learns, `average.NAME` its moving average,
        `moment.MOMENT.NAME` what AdamW keeps of it.
        """

    def shapes(self) -> Mapping[str, torch.Size]:
        """Of all tensors that it may ever have."""

    def whole(self, name: str, to: int = 0) -> Tensor | None:
        """One of the tensors, whole, on rank `to`; all ranks. Others may get None."""

    def load(self, tensors: Mapping[str, StoredTensor | Tensor]) -> None:
        """Each rank takes its part of tensors that it had, or another learner; all ranks."""

    def computed_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as the model computes with them, one by one, whole on every rank; all ranks.

        A tensor is good until the next one is asked for.
        """

    def full_weight(self, name: str) -> Tensor:
        """One of the model's weights, not rounded, whole on every rank's device; all ranks."""

    def full_precision(self) -> AbstractContextManager[Any]:
        """The model with its float32 weights in it, whole, on rank 0; all ranks."""
