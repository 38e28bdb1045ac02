"""Neighbouring ranks that sample as one: the first has a vLLM, whose workers use the GPUs of all.

Worker i computes on the GPU of the group's rank i, and is given weights by that rank. Always true:
- The ranks are on one node, each has a GPU of its own, and the first one sees them all.
- All make the same calls of the workers, in the same order. A call is carried out once every rank
  has come to it, and returns once it is done.
- Who waits has no time limit but the heartbeats of the others, which may sample for long.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stages.context import Context, StageError
from stages.engines.processes.bridge import FOR_EVER
from stages.engines.processes.heartbeats import Heartbeats

T = TypeVar("T")
CarryOut = Callable[[str, list[Any]], list[str]]
"""(method of the workers, the arguments of each) to what is wrong with each; empty: nothing."""


@dataclass(frozen=True)
class Place:
    """Where a rank computes."""

    host: str
    gpu: str
    """Its UUID; empty on a CPU."""


class SamplingGroup:
    """This rank among those of its group. Its methods are collectives of the group."""

    def __init__(self, ctx: Context, heartbeats: Heartbeats, start: int) -> None:
        """All ranks that sample make theirs together: the process group, from rank `start` on."""
        self._heartbeats = heartbeats
        self.size = ctx.ranks_per_sampler
        among = ctx.rank - start
        self.rank = among % self.size
        self._first = among - self.rank
        with heartbeats.waiting():
            self._group, _ = dist.new_subgroups(  # type: ignore[no-untyped-call]
                self.size, timeout=FOR_EVER, backend="gloo"
            )
        device = torch.device(ctx.device)
        gpu = _uuid(device.index or 0) if device.type == "cuda" else ""
        places = self.gather(Place(socket.gethostname(), gpu))
        self.gpus: list[int] = []
        """Numbers of the group's GPUs, by rank, as the first rank counts them; there alone."""
        if not self.rank:
            seen = [_uuid(each) for each in range(torch.cuda.device_count())] if gpu else []
            self.gpus = numbers_of(places, seen, ctx.rank)

    @property
    def leads(self) -> bool:
        """Whether the group's vLLM is this rank's."""
        return self.rank == 0

    def meet(self, at: str) -> None:
        """Wait until all have come to `at`."""
        self._heartbeats.at = at
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, by rank."""
        values: list[Any] = [None] * self.size
        with self._heartbeats.waiting(patient=True):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def same(self, value: T) -> T:
        """The first rank's value, on every rank."""
        values = [value]
        with self._heartbeats.waiting(patient=True):
            dist.broadcast_object_list(values, src=self._first, group=self._group)
        return values[0]

    def call_by(self, carry_out: CarryOut | None) -> Callable[..., None]:
        """What calls a method of every worker, each with the arguments that its own rank gives.

        `carry_out` is the first rank's. Where something is wrong, all ranks raise StageError, and
        those whose workers it is wrong with say what.
        """

        def call(method: str, *arguments: Any) -> None:
            given = self.gather(arguments)
            wrong = self.same(carry_out(method, given) if carry_out else [])
            if any(wrong):
                raise StageError(wrong[self.rank])

        return call


def numbers_of(places: Sequence[Place], seen: Sequence[str], first: int) -> list[int]:
    """Which of the GPUs that a process sees those of a group are; none on a CPU.

    `first` is the number of the group's first rank, for messages.
    """
    ranks = f"tensor_parallel {len(places)} has ranks {first} to {first + len(places) - 1}"
    if len(hosts := {place.host for place in places}) > 1:
        raise StageError(
            f"{ranks} sample as one, and they are on {', '.join(sorted(hosts))}: have Slurm fill "
            "one node after the other (its default, distribution: block), or set "
            "tensor_parallel: 1"
        )
    gpus = [place.gpu for place in places if place.gpu]
    if len(set(gpus)) < len(gpus):
        raise StageError(
            f"{ranks} sample as one, over a GPU of each, and some of them have the same: set "
            "gpus_per_node to tasks_per_node and device: cuda, or tensor_parallel: 1"
        )
    if hidden := [rank for rank, gpu in enumerate(gpus, first) if gpu not in seen]:
        raise StageError(
            f"{ranks} sample as one, and rank {first} does not see the GPU of rank {hidden[0]}: "
            "have every process of a node see all its GPUs (no gpu-bind, gpus-per-task or "
            "CUDA_VISIBLE_DEVICES of its own), or set tensor_parallel: 1"
        )
    return [seen.index(gpu) for gpu in gpus]


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
