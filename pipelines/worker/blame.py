"""Which nodes are to blame for what was measured between them: pure functions, told by tests.

Who cannot be told apart shares the blame: of two nodes with a slow link between them, both.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from pipelines.ledger.preflight import BadNode
from stages.selftest.link_rates import INSIDE, Links


def blame(links: Links, floor: float, clock_seconds: float) -> tuple[BadNode, ...]:
    return (*_wrong(links), *_slow(links, floor), *_off(links.clocks, clock_seconds))


def _wrong(links: Links) -> Iterable[BadNode]:
    for where in links.wrong:
        for node in where.split(" and "):
            yield BadNode(node, f"collectives of {where} give wrong numbers")


def _slow(links: Links, floor: float) -> Iterable[BadNode]:
    for node, rate in links.inside.items():
        if rate < floor:
            yield BadNode(node, f"its ranks exchange {_rate(rate, floor)}")
    slow = {pair for pair, rate in links.between.items() if rate < floor}
    of_node: dict[str, list[tuple[str, str]]] = {}
    for pair in links.between:
        for node in pair:
            of_node.setdefault(node, []).append(pair)
    # A bad node is slow with each neighbour; a single slow link may be the fault of either end.
    guilty = {node for node, pairs in of_node.items() if slow.issuperset(pairs)}
    for pair in sorted(slow):
        for node in pair if not guilty.intersection(pair) else guilty.intersection(pair):
            other = pair[pair[0] == node]
            yield BadNode(node, f"with {other} it exchanges {_rate(links.between[pair], floor)}")


def _rate(rate: float, floor: float) -> str:
    return f"{rate:.3g} GB/s, the floor is {floor:g}"


def _off(clocks: Mapping[str, float], most: float) -> Iterable[BadNode]:
    if not clocks or max(clocks.values()) - min(clocks.values()) <= most:
        return
    middle = median(clocks.values())
    for node, offset in clocks.items():
        if abs(offset - middle) > most / 2:
            apart = max(offset - min(clocks.values()), max(clocks.values()) - offset)
            yield BadNode(node, f"its clock is {apart:.3g} s off another node's")


def late(
    before: Mapping[int, Mapping[str, Any]],
    now: Mapping[int, Mapping[str, Any]],
    nodes: Mapping[int, str],
    seconds: float,
) -> tuple[BadNode, ...]:
    """Of collectives that hang, by two looks at the heartbeats: whose ranks are silent.

    Or else, where others are past the exchange inside their nodes, those that are not.
    """
    silent = [rank for rank in nodes if _beat(before, rank) == _beat(now, rank)]
    if silent:
        why = f"it has been silent in collectives, which did not end within {seconds:g} s"
        return tuple(BadNode(nodes[rank], f"rank {rank}: {why}") for rank in silent)
    # A heartbeat that was there may be unreadable for a moment.
    inside = [rank for rank in nodes if str(now.get(rank, {}).get("at")).endswith(INSIDE)]
    if len(inside) == len(nodes):
        return ()
    why = f"the exchange among its ranks did not end within {seconds:g} s"
    return tuple(BadNode(node, why) for node in dict.fromkeys(nodes[rank] for rank in inside))


def _beat(heartbeats: Mapping[int, Mapping[str, Any]], rank: int) -> Any:
    return heartbeats[rank]["beat"] if rank in heartbeats else None
