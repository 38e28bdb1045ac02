"""A model that learns: its weights, AdamW's moments, a moving average, all as named tensors.

What learns are float32 weights, the *masters*. A model that computes in float32 has them as its
parameters. One that computes in bfloat16 has a rounded copy of them: the gradient of each
micro-batch is added up in float32, the optimizer moves the masters, and the copy is made anew after
each step, so that a step too small for bfloat16 is not lost. What is saved is never the copy.

Moments are named after the parameter they belong to, so that they can be written beside a model,
read back for the next iteration, and inspected.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload
from stages.engines.models.precision import is_rounded, rounded
from stages.engines.models.tensor_files import Form, StoredTensor, read_whole
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import Optimization
from stages.engines.training.offload import MOMENTS, MomentsOnHost

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Learner:
    """One model with its optimizer, all of it in this process. See `AnyLearner`.

    The model comes with float32 weights, whatever `precision`.
    """

    lockstep = False

    def __init__(self, model: Any, how: Optimization, offload: Offload = Offload.NONE) -> None:
        self.model = model
        self.how = how
        self.precision = how.precision
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._masters = self._split(how.precision)
        self._average = {
            name: master.detach().clone() for name, master in self._masters.items() if how.ema_decay
        }
        device = next(iter(self._masters.values())).device
        self._optimizer = how.adamw(model, self._masters, device)
        self._on_host = MomentsOnHost(self._optimizer) if offload is not Offload.NONE else None

    def _split(self, precision: Precision) -> dict[str, Tensor]:
        """Round the model's weights; the masters of those that learn, by name.

        `_copies` has each rounded parameter with its float32 weight. Weights that do not learn
        are only needed to be saved again, and theirs are kept on the CPU.
        """
        masters: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if precision is Precision.FLOAT32 or not is_rounded(self.model, name, parameter):
                if parameter.requires_grad:
                    masters[name] = parameter
                continue
            whole = parameter.data
            parameter.data = rounded(whole, precision)
            if parameter.requires_grad:
                masters[name] = whole.requires_grad_()
                parameter.register_post_accumulate_grad_hook(_adding_to(whole))
            else:
                whole = whole.cpu()
            self._copies[name] = (parameter, whole)
        return masters

    @contextmanager
    def full_precision(self) -> Iterator[Any]:
        low = {name: parameter.data for name, (parameter, _) in self._copies.items()}
        for parameter, whole in self._copies.values():
            parameter.data = whole.detach()
        try:
            yield self.model
        finally:
            for name, (parameter, _) in self._copies.items():
                parameter.data = low[name]
            self._round(self._masters)

    def parameters(self) -> Iterable[Tensor]:
        """Trainable parameters with their gradients, in float32."""
        return self._masters.values()

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._masters.items()

    def before_backward(self) -> float:
        return 1.0

    def sum_gradients(self, ranks: Ranks) -> None:
        ranks.sum_gradients(self.parameters())

    def weights_not_finite(self) -> list[str]:
        weights = self.model.named_parameters()
        return [name for name, weight in weights if not bool(weight.isfinite().all())]

    def clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self.how.max_grad_norm)
        return float(norm)

    def step(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.how.learning_rate * factor
        (self._on_host or self._optimizer).step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round(self._masters)
        for name, average in self._average.items():
            average.lerp_(self._masters[name].detach(), 1 - self.how.ema_decay)

    def settle(self) -> None:
        for name, average in self._average.items():
            self._masters[name].data.copy_(average)
        self._round(self._average)

    def _round(self, names: Iterable[str]) -> None:
        """Make the copies of these weights anew."""
        pairs = [self._copies[name] for name in names if name in self._copies]
        if pairs:
            low, whole = zip(*((p.data, w.detach()) for p, w in pairs), strict=True)
            torch._foreach_copy_(low, whole)

    def held(self) -> dict[str, Form]:
        tensors = {f"weight.{name}": value.data for name, value in self._masters.items()}
        tensors |= {f"average.{name}": value for name, value in self._average.items()}
        tensors |= {
            f"moment.{moment}.{name}": self._optimizer.state[master][moment]
            for name, master in self._masters.items()
            for moment in _MOMENTS
            if moment in self._optimizer.state[master]
        }
        return {name: Form.of(tensor) for name, tensor in tensors.items()}

    def shapes(self) -> dict[str, torch.Size]:
        weights = {f"weight.{name}": value.shape for name, value in self._masters.items()}
        averages = {f"average.{name}": value.shape for name, value in self._average.items()}
        moments = {
            f"moment.{moment}.{name}": torch.Size() if moment == "step" else value.shape
            for name, value in self._masters.items()
            for moment in _MOMENTS
        }
        return weights | averages | moments

    def whole(self, name: str, to: int = 0) -> Tensor:  # noqa: ARG002 every rank has all
        kind, _, rest = name.partition(".")
        if kind == "weight":
            return self._masters[rest].data
        if kind == "average":
            return self._average[rest]
        moment, _, parameter = rest.partition(".")
        value: Tensor = self._optimizer.state[self._masters[parameter]][moment]
        return value

    def load(self, tensors: Mapping[str, StoredTensor | Tensor]) -> None:
        for name, master in self._masters.items():
            if (weight := tensors.get(f"weight.{name}")) is not None:
                master.data.copy_(read_whole(weight))
            if (average := tensors.get(f"average.{name}")) is not None:
                self._average[name].copy_(read_whole(average))
            for moment in _MOMENTS:
                if (value := tensors.get(f"moment.{moment}.{name}")) is not None:
                    self._keep(master, moment, read_whole(value))
        self._round(self._masters)

    def _keep(self, master: Tensor, moment: str, value: Tensor) -> None:
        if self._on_host is not None and moment in MOMENTS:
            self._on_host.keep(master, moment, value)
        else:
            self._optimizer.state[master][moment] = value.to(master.device, copy=True)

    def computed_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.data

    def full_weight(self, name: str) -> Tensor:
        parameter: Tensor = self.model.get_parameter(name)
        _, whole = self._copies.get(name, (parameter, parameter))
        return whole.detach().to(parameter.device)


def _adding_to(master: Tensor) -> Any:
    """A hook that adds a parameter's fresh gradient to its master's."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return add
