"""Findings about what passes between nodes: collectives, clocks, the disk that they share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipelines.selftest.finding import Finding
from pipelines.selftest.seen import (
    FAILED,
    OK,
    SLOW,
    Seen,
    few,
    slow_ones,
)
from pipelines.selftest.settings import Measurement

SLOWEST_SHARE_OF_DISK = 0.5
"""The same of a disk, which others use at the same time."""
LEAST_GB_PER_S = {"nccl": 5.0, "gloo": 0.1}
"""Of an all-reduce of the largest size, over all ranks."""
LEAST_GB_PER_S_INSIDE = {"nccl": 20.0, "gloo": 0.1}
LEAST_DISK_GB_PER_S = 0.1
LARGEST_SYNC_S = 0.1
SEEN_SOON_S = 5.0
LARGEST_OFFSET_S = 5.0
LEAST_FREE_BYTES = 10 << 30


def collectives(seen: Seen) -> Iterator[Finding]:
    if seen.world == 1:
        yield Finding("collectives", OK, "one rank: there is nobody to exchange anything with")
        return
    backend = seen.of_first("collectives")["backend"]
    for key, words in (("all", "all ranks"), ("node", "within a node")):
        rows = [(each, row) for each, v in seen.values("collectives") for row in v[key]]
        if not rows:
            continue
        wrong = [
            f"{row['operation']} of {row['bytes'] >> 10} KiB gave {each.who} wrong numbers"
            for each, row in rows
            if not row["right"]
        ]
        largest = max(row["bytes"] for _, row in rows)
        smallest = min(row["bytes"] for _, row in rows)
        rates = {
            name: min(
                row["gb_per_s"]
                for _, row in rows
                if row["operation"] == name and row["bytes"] == largest
            )
            for name in dict.fromkeys(row["operation"] for _, row in rows)
        }
        latency = max(row["latency_s"] for _, row in rows if row["bytes"] == smallest)
        limit = (LEAST_GB_PER_S if key == "all" else LEAST_GB_PER_S_INSIDE).get(backend, 0.0)
        rate = rates["all-reduce"]
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in rates.items())
        detail = (
            f"{backend}: {numbers} GB/s at {largest >> 20} MiB; "
            f"{1e3 * latency:.2g} ms at {smallest >> 10} KiB"
        )
        verdict, remedy = OK, ""
        if wrong:
            verdict, detail = FAILED, f"{backend}: {few(wrong)}"
            remedy = "what is trained here would be wrong: see the network's and NCCL's versions, "
            remedy += "and repeat with NCCL_DEBUG=INFO in `setup`"
        elif rate < limit:
            verdict = SLOW
            remedy = f"less than {limit:g} GB/s: " + (
                "see with NCCL_DEBUG=INFO in `setup` which network it takes (NCCL_SOCKET_IFNAME, "
                "NCCL_IB_HCA), and `nvidia-smi topo -m`"
                if backend == "nccl"
                else "choose the network with GLOO_SOCKET_IFNAME in `setup`"
            )
        elif key == "node" and (slow := _slow_nodes(rows, largest)):
            verdict, detail = SLOW, f"{detail}; {few(slow)}"
            compare = "`nvidia-smi topo -m`" if backend == "nccl" else "what else runs"
            remedy = f"compare {compare} on these nodes; `exclude` them meanwhile"
        yield Finding(f"collectives, {words}", verdict, detail, rate, "GB/s", remedy)


def _slow_nodes(rows: Sequence[tuple[Measurement, dict[str, Any]]], largest: int) -> list[str]:
    rates: dict[str, float] = {}
    for each, row in rows:
        if row["operation"] == "all-reduce" and row["bytes"] == largest:
            rates[each.node] = min(rates.get(each.node, row["gb_per_s"]), row["gb_per_s"])
    return slow_ones(list(rates.items()))


def clocks(seen: Seen) -> Iterator[Finding]:
    offsets = [(abs(v["clock_offset_s"]), each.node) for each, v in seen.values("collectives")]
    largest, node = max(offsets)
    if seen.resources.nodes == 1:
        return
    detail = f"at most {largest:.2g} s apart"
    if largest > LARGEST_OFFSET_S:
        detail = f"{node} is {largest:.3g} s off"
    remedy = "have the clocks set by NTP or chrony: no result depends on them, but logs and NFS do"
    verdict = OK if largest <= LARGEST_OFFSET_S else FAILED
    yield Finding("clocks", verdict, detail, largest, "s", remedy)


def disks(seen: Seen) -> Iterator[Finding]:
    for name in seen.of_first("disk"):
        nodes = {each.node: v[name] for each, v in seen.values("disk") if v[name]}
        yield from _disk(name, nodes)


def _disk(name: str, nodes: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    for way in ("write", "read"):
        alone = [(node, float(values[f"{way}_alone"])) for node, values in nodes.items()]
        together = sum(values[f"{way}_together"] for values in nodes.values())
        least = min(rate for _, rate in alone)
        slow = slow_ones(alone, SLOWEST_SHARE_OF_DISK)
        detail = f"{least:.2g} GB/s a node alone at least"
        if len(nodes) > 1:
            detail += f", {together:.2g} GB/s by {len(nodes)} nodes together"
        too_slow = min(least, together) < LEAST_DISK_GB_PER_S
        remedy = (
            f"less than {LEAST_DISK_GB_PER_S} GB/s: a checkpoint of 7 billion weights takes more "
            "than 14 minutes; move the clone to a faster file system, or raise checkpoint_seconds"
            if too_slow
            else "these nodes reach the file system more slowly: see their mounts and network"
        )
        if slow:
            detail += f"; {few(slow)}"
        verdict = SLOW if too_slow or slow else OK
        yield Finding(f"disk {name}, {way}", verdict, detail, together, "GB/s", remedy)
    sync = max(values["sync_s"] for values in nodes.values())
    remedy = "the ledger flushes each of its files: every stage pays this time some dozens of times"
    detail = f"{1e3 * sync:.2g} ms a flushed write at most"
    verdict = OK if sync <= LARGEST_SYNC_S else SLOW
    yield Finding(f"disk {name}, fsync", verdict, detail, sync, "s", remedy)
    free = min(values["free_bytes"] for values in nodes.values())
    detail = f"{free / 1e9:.3g} GB free"
    remedy = "free some space: a policy with its state and a checkpoint need 24 bytes a weight"
    enough = free >= LEAST_FREE_BYTES
    yield Finding(f"disk {name}, room", OK if enough else SLOW, detail, free / 1e9, "GB", remedy)
    if len(nodes) > 1:
        yield _seen(name, nodes)
    locks = {node: values["lock"] for node, values in nodes.items() if values["lock"] != "ok"}
    detail = "a lock that is held keeps others out"
    detail += " on all nodes" if len(nodes) > 1 else ""
    bad = [f"{node}: {problem}" for node, problem in locks.items()]
    remedy = "mount the file system with locks (Lustre: -o flock; NFS: not local_lock, not nolock)"
    verdict = FAILED if bad else OK
    yield Finding(f"disk {name}, locks", verdict, few(bad) or detail, remedy=remedy)


def _seen(name: str, nodes: Mapping[str, dict[str, Any]]) -> Finding:
    """How soon the other nodes see what one has written."""
    delays: list[float] = []
    blind = []
    for node, values in nodes.items():
        for change, words in (("new", "a new file"), ("replaced", "a file's new content")):
            if f"{change}_seen_s" not in values:
                continue
            delay = values[f"{change}_seen_s"]
            if delay is None:
                blind.append(f"{node} never saw {words}")
            else:
                delays.append(delay)
    longest = max(delays, default=0.0)
    check = f"disk {name}, seen by others"
    if blind:
        remedy = "is this one file system on all nodes? Put the clone on one that is; on NFS mount "
        remedy += "with a shorter actimeo"
        return Finding(check, FAILED, few(blind), None, "s", remedy)
    detail = f"within {longest:.2g} s"
    remedy = "NFS caches that long: mount with lookupcache=positive and a shorter actimeo; "
    remedy += "everything works, but the ranks find each other late"
    return Finding(check, OK if longest <= SEEN_SOON_S else SLOW, detail, longest, "s", remedy)
