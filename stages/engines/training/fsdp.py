"""A learner whose weights, moments and gradients are spread over the ranks: torch's own FSDP2.

The ranks are those that were joined. Always true:
- What a rank holds of a weight, of its moments and of its average is a run of its rows, in float32;
  these are the weights that learn. Before a layer computes, its weights are gathered, rounded to
  what the model computes in, and dropped again afterwards.
- Gradients are sums over the ranks, as in processes/ranks.py: FSDP's own division is off.
- All ranks make the same passes through the model: a pass gathers weights, a backward pass adds
  gradients up. The head is gathered with a pass, not when it is called, so that a rank may call it
  as often as it likes.
- Outside, weights and moments have names and are whole, so that a checkpoint of four ranks fits
  two, or a learner that is not spread.

Departure from the learner of one process: a parameter that no row used has a gradient of zero, not
none, so its moments decay.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload
from stages.engines.models.lora import unwrapped
from stages.engines.models.precision import DTYPES, is_rounded, rounded
from stages.engines.models.spread import first_row, joined_mesh, pass_through_backbone, units_of
from stages.engines.models.tensor_files import Form, StoredTensor, read_whole
from stages.engines.models.unread import give_memory, unread_weights
from stages.engines.processes.ranks import Ranks, connect_alone
from stages.engines.training.learner import Optimization

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class FsdpLearner:
    """One model with its optimizer, a part of it in each rank. See `AnyLearner`."""

    lockstep = True

    def __init__(self, ctx: Context, ranks: Ranks, model: Any, how: Optimization) -> None:
        self.model = model
        self.how = how
        self.precision = how.precision
        self._rank, self._world = ranks.rank, ranks.world
        self._device = torch.device(ctx.device)
        self._shapes: dict[str, torch.Size] = {n: p.shape for n, p in model.named_parameters()}
        self._empty = _without_weights(model)
        unread = unread_weights(model)
        with ranks.exchanging():
            self._units = _spread(ctx, model, how.precision)
        self._learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            self._parts: dict[str, Tensor] = {n: p.to_local() for n, p in model.named_parameters()}
        for name, weight in unread.items():
            shape = self._shapes[name]
            first = first_row(shape[0], self._rank, self._world)
            weight.read_into(self._parts[name], first * shape[1:].numel())
        self._masters = {name: self._parts[name] for name in self._learning}
        self._averages = {
            name: master.clone() for name, master in self._masters.items() if how.ema_decay
        }
        where = next(iter(self._masters.values())).device
        self._optimizer = how.adamw(model, self._masters, where)

    def before_backward(self) -> float:
        return 1.0

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    @torch.no_grad()
    def sum_gradients(self, ranks: Ranks) -> None:  # noqa: ARG002
        """The backward passes have; here the optimizer gets this rank's part of the sums."""
        for name, parameter in self._learning.items():
            gradient: Any = parameter.grad
            self._masters[name].grad = None if gradient is None else gradient.to_local()

    def clip_gradients(self) -> float:
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients)
        squares = own.to(self._device, torch.float64).square()
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        factor = self.how.max_grad_norm / (norm + 1e-6)  # as torch's own clipping has it
        if factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def step(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.how.learning_rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._learning.values():
            parameter.grad = None
        self._drop_gathered()
        for name, average in self._averages.items():
            average.lerp_(self._masters[name], 1 - self.how.ema_decay)

    def settle(self) -> None:
        for name, average in self._averages.items():
            self._masters[name].copy_(average)
        self._drop_gathered()

    def weights_not_finite(self) -> list[str]:
        return [name for name, part in self._parts.items() if not bool(part.isfinite().all())]

    def held(self) -> dict[str, Form]:
        named = self._named(lambda master: self._optimizer.state.get(master, ()))
        return {name: Form(torch.float32, tuple(shape)) for name, shape in named.items()}

    def shapes(self) -> dict[str, torch.Size]:
        return self._named(lambda _: _MOMENTS)

    def whole(self, name: str, to: int = 0) -> Tensor | None:
        own = self._own(name)
        if own.dim() == 0:
            return own.cpu().clone()
        return self._gather(own, self._shapes[_parameter(name)], to)

    def load(self, tensors: Mapping[str, StoredTensor | Tensor]) -> None:
        for name, stored in tensors.items():
            parameter = _parameter(name)
            if parameter not in self._masters:
                continue
            self._start_moments(parameter, name)
            own = self._own(name)
            if own.dim() == 0:
                own.copy_(read_whole(stored))
            else:
                first = first_row(self._shapes[parameter][0], self._rank, self._world)
                own.copy_(stored[first : first + len(own)])
        self._drop_gathered()

    def computed_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in self._parts.items():
            low = part.to(self._device)
            if is_rounded(self._empty, name, part):
                low = rounded(low, self.precision)
            yield name, self._gather_everywhere(low, self._shapes[name])

    def full_weight(self, name: str) -> Tensor:
        return self._gather_everywhere(self._parts[name], self._shapes[name])

    @contextmanager
    def full_precision(self) -> Iterator[Any]:
        into = dict(self._empty.named_parameters())
        for name, part in self._parts.items():
            whole = self._gather(part, self._shapes[name], 0)
            if whole is not None:
                into[name].data = whole
        try:
            yield self._empty
        finally:
            for parameter in into.values():
                parameter.data = torch.empty(0)

    def _named(self, moments_of: Callable[[Tensor], Iterable[str]]) -> dict[str, torch.Size]:
        shapes = {f"weight.{name}": self._shapes[name] for name in self._masters}
        shapes |= {f"average.{name}": self._shapes[name] for name in self._averages}
        return shapes | {
            f"moment.{moment}.{name}": torch.Size() if moment == "step" else self._shapes[name]
            for name, master in self._masters.items()
            for moment in moments_of(master)
        }

    def _own(self, name: str) -> Tensor:
        """What this rank holds of a tensor."""
        kind, _, rest = name.partition(".")
        if kind == "weight":
            return self._masters[rest]
        if kind == "average":
            return self._averages[rest]
        state: dict[str, Tensor] = self._optimizer.state[self._masters[_parameter(name)]]
        return state[rest.partition(".")[0]]

    def _start_moments(self, parameter: str, name: str) -> None:
        """As AdamW itself does at its first step, where one of them is to be loaded."""
        master = self._masters[parameter]
        if name.startswith("moment.") and not self._optimizer.state[master]:
            where = master.device if master.is_cuda else "cpu"
            self._optimizer.state[master] = {
                "step": torch.tensor(0.0, device=where),
                **{moment: torch.zeros_like(master) for moment in _MOMENTS if moment != "step"},
            }

    def _padded(self, own: Tensor, shape: torch.Size) -> Tensor:
        """As many rows as every rank can have, where collectives can get at them."""
        padded = own.new_zeros(-(-shape[0] // self._world), *shape[1:], device=self._device)
        padded[: len(own)] = own
        return padded

    def _gather(self, own: Tensor, shape: torch.Size, to: int) -> Tensor | None:
        padded = self._padded(own, shape)
        parts = [torch.empty_like(padded) for _ in range(self._world)] if self._rank == to else None
        dist.gather(padded, parts, dst=to)
        return None if parts is None else torch.cat([part.cpu() for part in parts])[: shape[0]]

    def _gather_everywhere(self, own: Tensor, shape: torch.Size) -> Tensor:
        padded = self._padded(own, shape)
        gathered = padded.new_empty(self._world * len(padded), *padded.shape[1:])
        dist.all_gather(list(gathered.chunk(self._world)), padded)
        return gathered[: shape[0]]

    def _drop_gathered(self) -> None:
        """What was gathered for a pass, since the weights are others now."""
        for unit in self._units:
            unit.reshard()


def _parameter(name: str) -> str:
    """The parameter that a tensor is of, by the tensor's name."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == "moment" else rest


def _without_weights(model: Any) -> Any:
    """An ordinary copy of the model, whose weights are still to come."""
    return copy.deepcopy(
        model,
        {
            id(parameter): torch.nn.Parameter(torch.empty(0), parameter.requires_grad)
            for parameter in model.parameters()
        },
    )


def _spread(ctx: Context, model: Any, precision: Precision) -> list[FSDPModule]:
    """Leave this rank its part of each weight; the modules that are gathered one by one."""
    plain = unwrapped(model)
    connect_alone(ctx.device)
    mesh = joined_mesh(ctx.device)
    offload = OffloadPolicy()
    if ctx.offload is not Offload.NONE:
        offload = CPUOffloadPolicy(pin_memory=ctx.device.startswith("cuda"))
    units: list[FSDPModule] = []
    kept = _kept_as_they_are(model, precision)
    for module in units_of(model, apart=kept):
        give_memory(module)
        dtype = torch.float32 if module in kept else DTYPES[precision]
        # Inputs are what they are in one process, where nobody casts them.
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # A weight that only some ranks have used, such as an expert's, counts as zero on the
        # others. Versions of torch without the setting expect all ranks to use the same.
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        units.append(unit)
    embedding = plain.get_input_embeddings()
    if isinstance(embedding, FSDPModule):
        embedding.set_unshard_in_backward(False)  # its gradient does not depend on its weights
    pass_through_backbone(model)
    return units


def _kept_as_they_are(model: Any, precision: Precision) -> list[Any]:
    """The modules in the backbone with weights that are never rounded."""
    if precision is Precision.FLOAT32:
        return []
    kept_names = {n for n, p in model.named_parameters() if not is_rounded(model, n, p)}
    inside = set(unwrapped(model).base_model.modules())
    kept = []
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)} & kept_names
        if not own:
            continue
        everything = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if module not in inside or not everything <= kept_names:
            raise StageError(
                f"sharding fsdp in the profile, with precision {precision}: {min(own)} stays "
                f"float32 in this model ({model.config.model_type}), but weights that are gathered "
                "with it are rounded; set sharding to none, or precision to float32"
            )
        kept.append(module)
    return kept
