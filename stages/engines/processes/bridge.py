"""What joins the ranks that learn with those that only sample: stop requests, values, weights.

Each side is a process group of its own, and meets in collectives that the other one knows nothing
of. The bridge is beside both. Always true:
- Both sides come to the same places in the same order. Who comes first waits as long as the others
  send heartbeats: they are at work, and may take their time.
- A stop request that one rank has heard of before a meeting is known to all after it.
- Weights go from rank 0 to all samplers, one at a time, as they are.
"""

import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stages.context import Context
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.meeting import backend_of

T = TypeVar("T")
Weights = Iterator[tuple[str, Tensor]]
Forms = Sequence[tuple[str, torch.Size, torch.dtype]]
"""Name, shape and type of each weight: samplers have to know what comes, before it does."""
FOR_EVER = timedelta(days=365)
"""Heartbeats say when to give up, not the backend, which knows of nobody who is at work."""


class Bridge:
    """This rank's end of it. But for `send` and `receive`, all ranks of both sides call the same of
    its methods, in the same order."""

    def __init__(
        self, ctx: Context, heartbeats: Heartbeats, store: Any, timeout: timedelta
    ) -> None:
        self._ctx, self._heartbeats = ctx, heartbeats
        self._device = torch.device(ctx.device)
        self.first_sampler = ctx.world
        self._all: Any
        self._carrier: Any = None
        """The group that weights go through: rank 0 and the samplers."""
        num_ranks = ctx.world + ctx.samplers
        with heartbeats.waiting():
            self._all = dist.ProcessGroupGloo(_part(store, "bridge"), ctx.rank, num_ranks, FOR_EVER)  # type: ignore
            if ctx.rank == 0 or ctx.only_samples:
                place = (ctx.rank - self.first_sampler) + 1 if ctx.only_samples else 0
                where = (_part(store, "weights"), place, ctx.samplers + 1)
                on_gpus = backend_of(*where, self._device) == "nccl"
                kind: Any = dist.ProcessGroupNCCL if on_gpus else dist.ProcessGroupGloo  # type: ignore
                self._carrier = kind(*where, timeout)

    def meet(self, at: str) -> None:
        """Wait until all ranks have come to `at`; each then knows whether any was asked to stop."""
        self._heartbeats.at = at
        flag = torch.tensor([int(self._ctx.should_stop())])
        with self._heartbeats.waiting(patient=True):
            self._all.allreduce(flag, dist.ReduceOp.MAX).wait()
        if flag.item():
            self._ctx.request_stop()

    def same(self, value: T, source: int) -> T:
        """The value of rank `source`, on every rank."""
        data = bytearray(pickle.dumps(value) if source == self._ctx.rank else b"")
        size = torch.tensor([len(data)])
        with self._heartbeats.waiting(patient=True):
            self._all.broadcast(size, source).wait()
        data = data or bytearray(int(size.item()))
        with self._heartbeats.waiting():
            self._all.broadcast(torch.frombuffer(data, dtype=torch.uint8), source).wait()
        return value if source == self._ctx.rank else pickle.loads(data)

    def send(self, forms: Forms, weights: Weights) -> None:
        """Give the samplers these weights, which all that learn bring about together."""
        for (expected, _, _), (name, tensor) in zip(forms, weights, strict=True):
            assert name == expected, f"{name} comes in place of {expected}"
            if self._ctx.rank == 0:
                self._carry(tensor.to(self._device).contiguous())

    def receive(self, forms: Forms) -> Weights:
        """What is sent, one by one; samplers."""
        for name, shape, dtype in forms:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._carry(tensor)
            yield name, tensor

    def _carry(self, tensor: Tensor) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            # What this rank still computes is not time that it waits for others.
            torch.cuda.synchronize(self._device)
        # Of those that learn rank 0 alone comes here.
        with self._heartbeats.waiting(all_come=False):
            # As bytes: not every backend has every type.
            self._carrier.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
            if on_gpu:
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._carrier is not None and self._device.type == "cuda":
            self._carrier.shutdown()
        self._carrier = self._all = None


def _part(store: Any, name: str) -> Any:
    """For one group, in which others do not write."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
