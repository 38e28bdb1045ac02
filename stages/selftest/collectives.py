"""Collectives among ranks: whether each rank gets the right numbers, and how many bytes a second.

The numbers are small integers, which floating point adds without rounding: a result is right to the
bit or wrong. Bandwidth is the bus bandwidth that NCCL's own tests report: what each link carries,
comparable over any number of ranks. Ranks of one node are measured by themselves, too, all nodes at
the same time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stages.engines.processes.ranks import Ranks

KIB, MIB = 1 << 10, 1 << 20
BYTES = {"cuda": (64 * KIB, 1 * MIB, 16 * MIB, 256 * MIB), "cpu": (64 * KIB, 1 * MIB, 16 * MIB)}
SECONDS = 0.2
"""For how long one operation of one size is repeated."""
MOST_TIMES = 50
CYCLE = 61
"""What a rank sends repeats after so many numbers."""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange something."""

    ranks: Sequence[int]
    me: int
    """This rank's place among them."""
    group: Any = None
    """torch's process group; None: all ranks."""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Operation:
    run: Callable[[Tensor, Group], Tensor]
    """All ranks call it with what they send."""
    expected: Callable[[int, Group, torch.device], Tensor]
    """What each must get, of so many numbers sent by each."""
    share: Callable[[int], float]
    """Of the bytes of the result, how many each link carries, among so many ranks."""
    in_parts: bool = False
    """Whether each rank sends only its part of the result."""


def measure(ranks: Ranks, device: str, node: str) -> dict[str, Any]:
    """Among all ranks, and among those of this node; all ranks call it."""
    if ranks.world == 1:
        return {"backend": None, "all": [], "node": []}
    nodes = ranks.gather(node)
    everyone = Group(range(ranks.world), ranks.rank)
    with ranks.exchanging():
        rows = _measure(ranks, everyone, device)
        inside = _of_node(nodes, ranks.rank)
        of_node = _measure(ranks, inside, device) if len(set(nodes)) > 1 else []
    return {"backend": dist.get_backend(), "all": rows, "node": of_node}


def _of_node(nodes: Sequence[str], rank: int) -> Group:
    """All ranks make all groups, in the same order."""
    mine = Group([rank], 0)
    for node in sorted(set(nodes)):
        members = [each for each, its_node in enumerate(nodes) if its_node == node]
        group = dist.new_group(members)
        if rank in members:
            mine = Group(members, members.index(rank), group)
    return mine


def _measure(ranks: Ranks, group: Group, device: str) -> list[dict[str, Any]]:
    """One row for each operation and size; nothing of a rank that is alone in its group."""
    rows = []
    for num_bytes in BYTES[device.partition(":")[0]]:
        for name, operation in OPERATIONS.items():
            row = _one(ranks, group, operation, num_bytes // 4, torch.device(device))
            if row is not None:
                rows.append({"operation": name, "bytes": num_bytes, **row})
    return rows


def _one(
    ranks: Ranks, group: Group, operation: Operation, num: int, device: torch.device
) -> dict[str, Any] | None:
    alone = group.size == 1
    num_sent = num // group.size if operation.in_parts else num
    sent = pattern(num_sent, group.me, device)
    right, first_s = True, 0.0
    if not alone:
        got = operation.run(sent.clone(), group)
        right = torch.equal(got, operation.expected(num_sent, group, device))
        del got
        first_s = _timed(operation, sent, group, 1)
    # As often on every rank: on the slowest, for about as long as SECONDS.
    slowest = max(ranks.gather(first_s))
    times = max(1, min(MOST_TIMES, int(SECONDS / max(slowest, 1e-6))))
    if alone:
        return None
    seconds = _timed(operation, sent, group, times)
    gigabytes = 4 * num * times * operation.share(group.size) / 1e9
    return {"right": right, "gb_per_s": gigabytes / seconds, "latency_s": seconds / times}


def _timed(operation: Operation, sent: Tensor, group: Group, times: int) -> float:
    buffer = sent.clone()
    _wait(sent.device)
    started = time.monotonic()
    for _ in range(times):
        operation.run(buffer, group)
    _wait(sent.device)
    return max(time.monotonic() - started, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pattern(num: int, rank: int, device: torch.device) -> Tensor:
    """What a rank sends: other numbers than its neighbours, and no two parts alike."""
    return (torch.arange(num, device=device) % CYCLE + rank).float()


def _all_reduce(tensor: Tensor, group: Group) -> Tensor:
    dist.all_reduce(tensor, group=group.group)
    return tensor


def _sum(num: int, group: Group, device: torch.device) -> Tensor:
    of_ranks = group.size * (group.size - 1) / 2
    return group.size * pattern(num, 0, device) + of_ranks


def _all_gather(tensor: Tensor, group: Group) -> Tensor:
    all_of_them = tensor.new_empty(group.size * tensor.numel())
    dist.all_gather_into_tensor(all_of_them, tensor, group=group.group)
    return all_of_them


def _all(num: int, group: Group, device: torch.device) -> Tensor:
    return torch.cat([pattern(num, rank, device) for rank in range(group.size)])


def _broadcast(tensor: Tensor, group: Group) -> Tensor:
    dist.broadcast(tensor, src=group.ranks[0], group=group.group)
    return tensor


OPERATIONS = {
    "all-reduce": Operation(_all_reduce, _sum, lambda size: 2 * (size - 1) / size),
    "all-gather": Operation(_all_gather, _all, lambda size: (size - 1) / size, in_parts=True),
    "broadcast": Operation(
        _broadcast, lambda num, _, device: pattern(num, 0, device), lambda _: 1.0
    ),
}
