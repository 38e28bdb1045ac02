"""Neighbouring ranks that sample as one: the first has a vLLM, whose workers use the GPUs of all.

Worker i computes on the GPU of the group's rank i, and is given weights by that rank. Always true:
- The ranks are on one node, or on several with as many of them each. Every rank has a GPU of its
  own, and the first of a node sees those of all there, whose workers it starts.
- All make the same calls of the workers, in the same order. A call is carried out once every rank
  has come to it, and returns once it is done.
- Who waits has no time limit but the heartbeats of the others, which may sample for long.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stages.context import Context, StageError
from stages.engines.processes.bridge import FOR_EVER
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.node import node_name

T = TypeVar("T")
CarryOut = Callable[[str, list[Any]], list[str]]
"""(method of the workers, the arguments of each) to what is wrong with each; empty: nothing."""


@dataclass(frozen=True)
class Place:
    """Where a rank computes."""

    host: str
    """The node, by a name that the others resolve."""
    gpu: str
    """Its UUID; empty on a CPU."""
    process: int = 0


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
        places = self.gather(Place(node_name(), gpu, os.getpid()))
        nodes = nodes_of(places, ctx.rank - self.rank)
        self.num_nodes = len(nodes)
        self.node = self.rank // len(nodes[0])
        """Of this rank, in the group."""
        here = nodes[self.node]
        self.leads_node = self.rank == here.start
        """Whether the workers on this node are this rank's."""
        self.leaders = [places[node.start].process for node in nodes for _ in node]
        """For each rank, the process that its worker is of, on its own node."""
        self.host, self.port = places[0].host, 0
        """Where workers of several nodes meet; see `agree_to_open`."""
        self.gpus: list[int] = []
        """Numbers of the GPUs of this node's ranks as the first of these counts them; there
        alone."""
        if self.leads_node:
            seen = [_uuid(each) for each in range(torch.cuda.device_count())] if gpu else []
            self.gpus = numbers_of(places[here.start : here.stop], seen, ctx.rank)

    @property
    def leads(self) -> bool:
        """Whether the group's vLLM is this rank's."""
        return self.rank == 0

    def agree_to_open(self, wanted: bool) -> bool:
        """Whether the first rank wants its vLLM; then the first of each node opens its part."""
        wanted, self.port = self.same((wanted, _free_port() if self.leads else 0))
        return wanted

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what the first ranks of several nodes start together.

        In it each waits for the others: where a rank fails meanwhile, or is lost, this one ends.
        """
        if self.num_nodes == 1:
            yield
            return
        with self._heartbeats.waiting(patient=True, all_come=False):
            yield

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


def nodes_of(places: Sequence[Place], first: int) -> list[range]:
    """The ranks of a group by node; vLLM has as many workers on each, one node after the other.

    `first` is the number of the group's first rank, for messages.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    size = len(places) // len(hosts)
    nodes = [range(start, start + size) for start in range(0, size * len(hosts), size)]
    if [place.host for place in places] != [host for host in hosts for _ in range(size)]:
        raise StageError(
            f"{_named(places, first)} sample as one, and they are on "
            f"{', '.join(place.host for place in places)}, in this order: have Slurm fill one node "
            "after the other (its default, distribution: block), or set tensor_parallel: 1"
        )
    return nodes


def numbers_of(places: Sequence[Place], seen: Sequence[str], first: int) -> list[int]:
    """Which of the GPUs that a process sees those of ranks of its node are; none on a CPU.

    `first` is the number of the first of these ranks, for messages.
    """
    ranks = _named(places, first)
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


def _named(places: Sequence[Place], first: int) -> str:
    return f"with tensor_parallel, ranks {first} to {first + len(places) - 1}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
