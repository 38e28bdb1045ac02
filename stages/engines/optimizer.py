"""A model that learns: its weights, AdamW's moments, a moving average, all as named tensors.

Moments are named after the parameter they belong to, so that they can be written beside a model,
read back for the next iteration, and inspected.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Learner:
    """One model with its optimizer."""

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        max_grad_norm: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        ema_decay: float = 0.0,
    ) -> None:
        self.model = model
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._ema_decay = ema_decay
        self._average = {
            name: parameter.detach().clone()
            for name, parameter in self._parameters.items()
            if ema_decay > 0
        }
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    def parameters(self) -> Iterable[Tensor]:
        return self._parameters.values()

    def clip_gradients(self) -> float:
        """Scale the gradients down to the largest norm allowed; the norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.max_grad_norm)
        return float(norm)

    def step(self, factor: float) -> None:
        """One optimizer step at `factor` times the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for name, average in self._average.items():
            average.lerp_(self._parameters[name].detach(), 1 - self._ema_decay)

    def settle(self) -> None:
        """Put the moving average, where there is one, in the place of the weights."""
        for name, average in self._average.items():
            self._parameters[name].data.copy_(average)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state, by parameter."""
        return {
            f"{moment}.{name}": self._optimizer.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in _MOMENTS
            if moment in self._optimizer.state[parameter]
        }

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            for moment in _MOMENTS:
                if f"{moment}.{name}" in moments:
                    # AdamW keeps its step counter on the CPU.
                    device = "cpu" if moment == "step" else parameter.device
                    value = moments[f"{moment}.{name}"].to(device)
                    self._optimizer.state[parameter][moment] = value

    def tensors(self) -> dict[str, Tensor]:
        """All that changes in training."""
        weights = {f"weight.{name}": value.data for name, value in self._parameters.items()}
        averages = {f"average.{name}": value for name, value in self._average.items()}
        moments = {f"moment.{name}": value for name, value in self.moments().items()}
        return weights | averages | moments

    def shapes(self) -> dict[str, torch.Size]:
        """Of all that `tensors` may have."""
        weights = {f"weight.{name}": value.shape for name, value in self._parameters.items()}
        averages = {f"average.{name}": value.shape for name, value in self._average.items()}
        moments = {
            f"moment.{moment}.{name}": torch.Size() if moment == "step" else value.shape
            for name, value in self._parameters.items()
            for moment in _MOMENTS
        }
        return weights | averages | moments

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data.copy_(tensors[f"weight.{name}"])
        for name, average in self._average.items():
            average.copy_(tensors[f"average.{name}"])
        prefix = "moment."
        self.load_moments(
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        )
