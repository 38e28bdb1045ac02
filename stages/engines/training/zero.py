"""A learner whose weights, moments and gradients are spread over the ranks: DeepSpeed ZeRO.

The ranks are those that were joined; DeepSpeed starts no process of its own. Always true:
- Gradients are sums over the ranks, as in processes/ranks.py. DeepSpeed takes means, so a loss
  is multiplied by the number of ranks beforehand.
- All ranks make the same passes through the model: a pass gathers weights (zero3), and a backward
  pass adds gradients up (zero2 and zero3).
- What a rank holds of a parameter is one run of its numbers, a `Part` (parts of it are gathered bit
  by bit, never rounded). Outside, weights and moments have names and are whole, so that a
  checkpoint of four ranks fits two, or a learner that is not spread.
- Weights that learn are float32, whatever the model computes in; they start from the model's own
  float32 weights, not from what DeepSpeed makes of these after rounding.

Departure from the other learner: a parameter that no row used has a gradient of zero, not none, so
its moments decay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stages.context import Context
from stages.engines.models.lora import HEAD, unwrapped
from stages.engines.models.tensor_files import Form, StoredTensor, read_whole
from stages.engines.models.unread import Unread, unread_weights
from stages.engines.processes.deepspeed_engine import ZERO_STAGES, configured, open_engine
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import Optimization

_FLAT = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, laid out as the weights are."""
_STEP = "step"
"""Its step counter: one number."""


@dataclass(frozen=True)
class FlatSlice:
    """The run of a parameter's numbers that this rank holds, in one of its flat tensors."""

    flat: int
    """Which of the flat tensors."""
    at: int
    """Where the run starts there."""
    start: int
    """Where it starts in the parameter."""
    size: int


class ZeroLearner:
    """One model with its optimizer, a part of it in each rank. See `AnyLearner`."""

    lockstep = True

    def __init__(self, ctx: Context, ranks: Ranks, model: Any, how: Optimization) -> None:
        self.model = model
        self.how = how
        self.precision = how.precision
        self._rank, self._world = ranks.rank, ranks.world
        self._device = torch.device(ctx.device)
        self._stage = ZERO_STAGES[ctx.sharding]
        self._shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        self._frozen_shapes = {
            n: p.shape for n, p in model.named_parameters() if not p.requires_grad
        }
        self._step_count = 0.0
        unread = unread_weights(model)
        before = {
            name: unread.get(name, parameter.data) for name, parameter in model.named_parameters()
        }
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = how.adamw(model, learning, self._device)
        with ranks.exchanging():
            self._engine = open_engine(
                ctx, model, optimizer, configured(ctx, how.max_grad_norm, how.precision)
            )
            self._zero = self._engine.optimizer
            self._parts = self._find_parts()
            self._frozen = {name: before[name] for name in self._frozen_shapes if not self._rank}
            self._read_frozen(unread)
            if self._stage == 3:
                self._keep_the_heads()
            for name in self._shapes:
                self._put(self._flats(), name, before[name])
            del before
            self._refresh()
        self._averages = [flat.clone() for flat in self._flats()] if how.ema_decay else []
        ranks.at_end(self._end)

    def before_backward(self) -> float:
        self._zero.clear_backward_seen_flag()
        self._engine._backward_prologue()
        return float(self._world)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def sum_gradients(self, ranks: Ranks) -> None:
        """What is left of it after the backward passes."""
        with ranks.exchanging():
            if self._stage == 1:
                self._engine._running_engine_step = True
                self._engine.allreduce_gradients()
                self._engine._running_engine_step = False
            else:
                self._zero.finalize_gradient_accumulation_boundary()

    def clip_gradients(self) -> float:
        """The norm; DeepSpeed scales down, in the same way, when it takes the step."""
        from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

        if self._stage == 3:
            norm = float(combine_grad_norm_groups(self._zero._get_norm_groups()))
        else:
            norm = float(self._zero.scaled_global_norm())
        # DeepSpeed says -1 of gradients that are not finite.
        return norm if norm >= 0 else float("nan")

    def step(self, factor: float) -> None:
        for group in self._zero.optimizer.param_groups:
            group["lr"] = self.how.learning_rate * factor
        self._zero.step()
        self._zero.zero_grad(set_to_none=True)
        self._step_count += 1
        for average, flat in zip(self._averages, self._flats(), strict=False):
            average.lerp_(flat.detach(), 1 - self.how.ema_decay)

    def settle(self) -> None:
        if self._averages:
            for average, flat in zip(self._averages, self._flats(), strict=True):
                flat.data.copy_(average)
            self._refresh()

    def weights_not_finite(self) -> list[str]:
        return [
            name
            for name, part in self._parts.items()
            if not bool(self._flats()[part.flat][part.at : part.at + part.size].isfinite().all())
        ]

    @contextmanager
    def full_precision(self) -> Iterator[Any]:
        whole = self._gather()
        computed_with = [parameter.data for parameter in self.model.parameters()]
        for name, parameter in self.model.named_parameters():
            parameter.data = whole.get(name, parameter.data)
        try:
            yield self.model
        finally:
            for parameter, weight in zip(self.model.parameters(), computed_with, strict=True):
                parameter.data = weight

    def held(self) -> dict[str, Form]:
        kinds = self._kinds()
        if not self._step_count:
            kinds = [kind for kind in kinds if not kind.startswith("moment.")]
        named = self._named(kinds)
        return {name: Form(torch.float32, tuple(shape)) for name, shape in named.items()}

    def shapes(self) -> dict[str, torch.Size]:
        return self._named(self._kinds())

    def _kinds(self) -> list[str]:
        averages = ["average"] if self._averages else []
        return ["weight", *averages, *(f"moment.{moment}" for moment in (*_FLAT, _STEP))]

    def _named(self, kinds: Iterable[str]) -> dict[str, torch.Size]:
        return {
            f"{kind}.{name}": torch.Size() if kind == f"moment.{_STEP}" else shape
            for kind in kinds
            for name, shape in self._shapes.items()
        }

    def whole(self, name: str, to: int = 0) -> Tensor | None:
        kind, parameter = self._split(name)
        if kind == f"moment.{_STEP}":
            return torch.tensor(self._step_count)
        return self._get(self._flats_of(kind), parameter, to)

    def load(self, tensors: Mapping[str, StoredTensor | Tensor]) -> None:
        for name, tensor in tensors.items():
            kind, parameter = self._split(name)
            if kind.startswith("moment."):
                self._start_moments()
            if kind == f"moment.{_STEP}":
                self._count(max(self._step_count, float(read_whole(tensor))))
            elif parameter in self._shapes:
                self._put(self._flats_of(kind), parameter, tensor)
        self._refresh()

    def computed_weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.model.named_parameters():
            # One that every rank keeps whole would be taken apart at the end.
            spread = self._stage == 3 and not parameter.ds_persist
            with deepspeed.zero.GatheredParameters([parameter], enabled=spread):
                yield name, parameter.data

    def full_weight(self, name: str) -> Tensor:
        if name in self._shapes:
            whole = self._own_of_whole(self._flats(), name)
            dist.all_reduce(whole.view(torch.int32))
            return whole.view(self._shapes[name])
        if self._rank:
            whole = torch.empty(self._frozen_shapes[name], device=self._device)
        else:
            whole = _whole(self._frozen[name]).to(self._device)
        dist.broadcast(whole, 0)
        return whole

    def _split(self, name: str) -> tuple[str, str]:
        """The kind of a tensor, and the parameter that it is of."""
        kind, _, parameter = name.partition(".")
        if kind == "moment":
            moment, _, parameter = parameter.partition(".")
            kind = f"moment.{moment}"
        return kind, parameter

    def _flats_of(self, kind: str) -> Sequence[Tensor]:
        if kind == "weight":
            return self._flats()
        if kind == "average":
            return self._averages
        moment = kind.removeprefix("moment.")
        return [self._zero.optimizer.state[flat][moment] for flat in self._flats()]

    def _flats(self) -> Sequence[Tensor]:
        """The float32 weights that this rank holds."""
        if self._stage == 3:
            flats: Sequence[Tensor] = self._zero.fp32_partitioned_groups_flat
        else:
            flats = self._zero.single_partition_of_fp32_groups
        return flats

    def _start_moments(self) -> None:
        """As AdamW itself does at its first step."""
        for flat in self._flats():
            state = self._zero.optimizer.state[flat]
            if not state:
                device = flat.device if self._device.type == "cuda" else "cpu"
                state["step"] = torch.tensor(0.0, device=device)
                state |= {moment: torch.zeros_like(flat.data) for moment in _FLAT}

    def _count(self, steps: float) -> None:
        self._step_count = steps
        for flat in self._flats():
            self._zero.optimizer.state[flat]["step"].fill_(steps)

    def _find_parts(self) -> dict[str, FlatSlice]:
        """Of each parameter that learns; one that lies with other ranks has none."""
        parts: dict[str, FlatSlice] = {}
        groups = [] if self._stage == 3 else self._zero.bit16_groups
        flat_of = {parameter: flat for flat, group in enumerate(groups) for parameter in group}
        for name, parameter in self.model.named_parameters():
            if name not in self._shapes:
                continue
            if self._stage == 3:
                flat, at, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = size * self._rank
                # The last part is filled up where the numbers do not divide evenly.
                size = min(int(size), self._shapes[name].numel() - start)
                if size > 0:
                    parts[name] = FlatSlice(int(flat), int(at), int(start), size)
            elif (here := parameter._hp_mapping) is not None:
                there, inside = here.hp_fragment_address, here.lp_fragment_address
                flat = flat_of[parameter]
                parts[name] = FlatSlice(flat, there.start, inside.start, inside.numel)
        return parts

    def _get(self, flats: Sequence[Tensor], name: str, to: int = 0) -> Tensor | None:
        """The whole tensor, on the CPU of rank `to`; all ranks call it."""
        whole = self._own_of_whole(flats, name)
        dist.reduce(whole.view(torch.int32), to)
        return whole.view(self._shapes[name]).cpu() if self._rank == to else None

    def _own_of_whole(self, flats: Sequence[Tensor], name: str) -> Tensor:
        """What this rank holds of a tensor, flat, with zeros for what others do.

        Ranks add them up as integers: nothing is rounded, and zeros leave -0.0 what it is.
        """
        whole = torch.zeros(self._shapes[name].numel(), device=self._device)
        if part := self._parts.get(name):
            own = flats[part.flat].detach()[part.at : part.at + part.size]
            whole[part.start : part.start + part.size] = own
        return whole

    def _gather(self) -> dict[str, Tensor]:
        """All weights in float32, on the CPU of rank 0; all ranks call it."""
        trained = {name: self._get(self._flats(), name) for name in self._shapes}
        frozen = {name: _whole(weight) for name, weight in self._frozen.items()}
        return {**frozen, **{name: w for name, w in trained.items() if w is not None}}

    def _put(
        self, flats: Sequence[Tensor], name: str, whole: StoredTensor | Unread | Tensor
    ) -> None:
        """Take this rank's part of a whole tensor; of one in a file, no other row is read."""
        if part := self._parts.get(name):
            if isinstance(whole, Unread):
                whole.read_into(flats[part.flat].data[part.at : part.at + part.size], part.start)
                return
            length = self._shapes[name][1:].numel()
            first = part.start // length
            rows = whole[first : -(-(part.start + part.size) // length)].detach().reshape(-1)
            own = rows[part.start - first * length :][: part.size]
            flats[part.flat].data[part.at : part.at + part.size].copy_(own)

    def _read_frozen(self, unread: Mapping[str, Unread]) -> None:
        """Fill this rank's parts of weights that do not learn, which have no flat tensor."""
        for name, parameter in self.model.named_parameters():
            if name in self._frozen_shapes and name in unread:
                part = parameter.ds_tensor
                start = part.numel() * self._rank
                size = min(part.numel(), self._frozen_shapes[name].numel() - start)
                if size > 0:
                    unread[name].read_into(part[:size], start)

    def _refresh(self) -> None:
        """Make the weights that the model computes with anew from the float32 ones; all ranks."""
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        for group in range(len(self._flats())):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self._zero.persistent_parameters:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def _keep_the_heads(self) -> None:
        """Every rank keeps the heads whole, and DeepSpeed does not follow their calls.

        The output head is called once for each chunk of tokens, and not all ranks have as many of
        these. A scalar head may be called with float32 copies of its weights, which are none of
        DeepSpeed's.
        """
        offload = self._zero.parameter_offload
        plain = unwrapped(self.model)
        # A pass starts with the backbone: the whole model is hardly ever called as such.
        offload.fwd_pre_hook.remove()
        coordinator = offload.get_param_coordinator()
        plain.base_model.register_forward_pre_hook(
            lambda *_: coordinator.reset_step(), prepend=True
        )
        output, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
        # One weight for both: after the embedding's call, DeepSpeed would take it from the head.
        tied = output is not None and output.weight is embedding.weight
        for kept in (output, getattr(plain, HEAD, None), embedding if tied else None):
            if kept is not None:
                self._keep(kept)

    def _keep(self, layer: Any) -> None:
        offload = self._zero.parameter_offload
        own_hooks = [
            hooks
            for module in layer.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        for handle in [*offload.forward_hooks, *offload.backward_hooks]:
            if any(handle.hooks_dict_ref() is hooks for hooks in own_hooks):
                handle.remove()
        kept = self._zero.persistent_parameters
        for parameter in layer.parameters():
            if not parameter.ds_persist:
                parameter.ds_persist = True
                kept.append(parameter)
                parameter.all_gather([parameter])

    def _end(self) -> None:
        """Let go of what DeepSpeed keeps beyond the ranks' end; all ranks call it."""
        self._engine.destroy()
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._averages = []
        del self._engine, self._zero


def _whole(weight: Unread | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.whole()
