"""The links between a job's nodes, and those inside each, in a second or so; and their clocks.

A number for all ranks together would name nobody. So the ranks of each node are measured by
themselves, and then each node with either neighbour: a bad one is slow wherever it takes part.
Meeting and rates are real, over the backend that the stage will use; all groups end here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stages.engines.processes.meeting import backend_of, open_store
from stages.selftest.collectives import MIB, OPERATIONS, Group, pattern
from stages.selftest.link_rates import INSIDE, Links

BYTES = 8 * MIB
TRIES = 3
"""The best counts: machines stall."""
CLOCK_ROUNDS = 5


def measure_links(
    rank: int,
    world: int,
    node: str,
    device: str,
    timeout_s: float,
    at: Callable[[str], None] = lambda _: None,
) -> Links:
    """All ranks call it, each with its node; `at` is told how far this one is."""
    timeout = timedelta(seconds=timeout_s)
    at("the meeting of all ranks")
    store = open_store(rank, world, timeout)
    backend = backend_of(store, rank, world, torch.device(device))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("preflight", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    nodes: list[Any] = [None] * world
    dist.all_gather_object(nodes, node)
    links = _measure(rank, nodes, torch.device(device), at)
    # After an error the group stays until this process ends, when it has said what is wrong: to the
    # others, a connection that it closes before would look like a fault of their own.
    dist.destroy_process_group()
    return links


def _measure(
    rank: int, nodes: Sequence[str], device: torch.device, at: Callable[[str], None]
) -> Links:
    names = list(dict.fromkeys(nodes))
    found: dict[tuple[str, ...], tuple[float, bool]] = {}
    at(INSIDE)
    for name in names:
        _note(found, (name,), [r for r, node in enumerate(nodes) if node == name], rank, device)
    at("between nodes")
    for one, two in neighbours(len(names)):
        pair = (names[one], names[two])
        _note(found, pair, [nodes.index(name) for name in pair], rank, device)
    at("all ranks")
    clock = _clocks(nodes)
    everything: list[Any] = [None] * len(nodes)
    dist.all_gather_object(everything, found)
    rates: dict[tuple[str, ...], float] = {}
    wrong: set[tuple[str, ...]] = set()
    for of_rank in everything:
        for where, (rate, right) in of_rank.items():
            rates[where] = min(rate, rates.get(where, rate))
            wrong |= set() if right else {where}
    return Links(
        inside={where[0]: rate for where, rate in rates.items() if len(where) == 1},
        between={(where[0], where[1]): rate for where, rate in rates.items() if len(where) == 2},
        wrong=tuple(sorted(" and ".join(where) for where in wrong)),
        clocks=clock,
    )


def neighbours(count: int) -> Iterator[tuple[int, int]]:
    """In an order in which most pairs do not wait for one another."""
    pairs = [(n, n + 1) for n in range(count - 1)]
    yield from pairs[::2]
    yield from pairs[1::2]
    if count > 2:
        yield count - 1, 0


def _note(
    found: dict[tuple[str, ...], tuple[float, bool]],
    where: tuple[str, ...],
    members: list[int],
    rank: int,
    device: torch.device,
) -> None:
    """All ranks make the group; its members measure it."""
    if len(members) == 1:
        return
    made = dist.new_group(members)
    if rank in members:
        found[where] = _rate(Group(members, members.index(rank), made), device)


def _rate(group: Group, device: torch.device) -> tuple[float, bool]:
    """Bus bandwidth of an all-reduce, and whether its result is right."""
    operation, num = OPERATIONS["all-reduce"], BYTES // 4
    sent = pattern(num, group.me, device)
    got = operation.run(sent.clone(), group)
    right = torch.equal(got, operation.expected(num, group, device))
    times = []
    for _ in range(TRIES):
        _settle(device)
        started = time.monotonic()
        operation.run(sent, group)
        _settle(device)
        times.append(time.monotonic() - started)
    return BYTES * operation.share(group.size) / max(min(times), 1e-9) / 1e9, right


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clocks(nodes: Sequence[str]) -> dict[str, float]:
    """By the round in which a node seems to be the least ahead or behind: others were late."""
    least: dict[str, float] = {}
    for _ in range(CLOCK_ROUNDS):
        times: list[Any] = [None] * len(nodes)
        dist.all_gather_object(times, None)
        dist.all_gather_object(times, time.time())
        of_nodes = dict(zip(reversed(nodes), reversed(times), strict=True))
        middle = median(of_nodes.values())
        for node, seconds in of_nodes.items():
            offset = seconds - middle
            least[node] = min(least.get(node, offset), offset, key=abs)
    return least
