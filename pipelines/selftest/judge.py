"""The judgement of a self-test: from the ranks' measurements to findings, and nothing else.

A pure function: it reads no file, no clock and no cluster, so what it says of a broken machine can
be shown without one. A check that some rank has not measured has failed, and says why.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipelines.config.profiles import ExecutorKind, Resources, bytes_of
from pipelines.selftest.finding import Finding, Verdict
from pipelines.selftest.settings import WORDS, Measurement

SEE_LOG = "see the logs in the folder below"
OK, SLOW, FAILED = Verdict.OK, Verdict.SLOW, Verdict.FAILED

SLOWEST_SHARE = 0.8
"""A rank or node that reaches less of the others' median is named."""
SLOWEST_SHARE_OF_DISK = 0.5
"""The same of a disk, which others use at the same time."""
MATMUL_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
LEAST_GB_PER_S = {"nccl": 5.0, "gloo": 0.1}
"""Of an all-reduce of the largest size, over all ranks."""
LEAST_GB_PER_S_INSIDE = {"nccl": 20.0, "gloo": 0.1}
LEAST_DISK_GB_PER_S = 0.1
LARGEST_SYNC_S = 0.1
SEEN_SOON_S = 5.0
LARGEST_OFFSET_S = 5.0
LEAST_FREE_BYTES = 10 << 30
LOSS_APART = 1e-4
"""Largest difference of a step's loss or gradient norm, relative to it."""
WEIGHTS_APART = 0.02
"""Largest difference of a weight, relative to the largest step that training has moved one."""
LOGPROBS_APART = {"float32": 1e-3, "bfloat16": 0.05}
HEARD_S = 30.0
"""What survivors may need beyond the time limit of a collective to name a rank."""
_EQUAL = ("python", "cuda", "gpu_driver", "gpu", "cpu")
_EQUAL_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class Seen:
    """All that is judged."""

    measured: Mapping[str, Sequence[Measurement]]
    resources: Resources
    executor: ExecutorKind
    collective_seconds: float
    """The time limit of collectives in the job."""

    @property
    def world(self) -> int:
        return self.resources.nodes * self.resources.tasks_per_node

    @property
    def on_gpus(self) -> bool:
        return self.resources.device != "cpu"

    def values(self, check: str) -> list[tuple[Measurement, dict[str, Any]]]:
        return [(each, each.values) for each in self.measured.get(check, ())]

    def of_first(self, check: str) -> dict[str, Any]:
        return self.measured[check][0].values


Judge = Callable[[Seen], Iterator[Finding]]


def judge(seen: Seen) -> list[Finding]:
    """One finding or more for each check, in the order of the page."""
    findings: list[Finding] = []
    named: set[str] = set()
    # A job that ended early has left out all that came after: one line is enough for these.
    unreached = [check for check in WORDS if check not in seen.measured and check != "vllm"]
    if unreached:
        words = ", ".join(WORDS[check] for check in unreached)
        findings.append(Finding("not reached", FAILED, words, remedy=SEE_LOG))
    for checks, judges in _JUDGES.items():
        if any(check not in seen.measured for check in checks):
            continue
        missing = {check: found for check in checks if (found := _missing(seen, check))}
        findings += [found for check, found in missing.items() if check not in named]
        named |= set(missing)
        if not missing:
            findings += [finding for each in judges for finding in each(seen)]
    return findings


def _missing(seen: Seen, check: str) -> Finding | None:
    """That a check was not measured by all who had to, if so."""
    there = seen.measured.get(check, ())
    errors = [each for each in there if each.error]
    # Where one rank fails, the others only say that it did.
    errors.sort(key=lambda each: "RankLost" in (each.error or ""))
    expected = 1 if check in ("alone", "vllm") else seen.world
    if errors:
        first = errors[0]
        detail = f"{first.who}: {first.error}"
        return Finding(WORDS[check], FAILED, detail, remedy=_remedy_of(first.error))
    if len(there) < expected:
        absent = sorted(set(range(expected)) - {each.rank for each in there})
        ranks = ", ".join(map(str, absent[:8]))
        detail = f"no result of rank {ranks}: the job ended before it"
        return Finding(WORDS[check], FAILED, detail, remedy=SEE_LOG)
    return None


def _remedy_of(error: str | None) -> str:
    text = error or ""
    if "CUDA" in text or "GPU" in text:
        return "see `nvidia-smi` on that node; `device`, `gpus_per_node` and `gres` in the profile"
    if "NCCL" in text or "Gloo" in text or "gloo" in text or "RankLost" in text:
        return (
            "see the network between the nodes: set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in "
            "`setup`, and NCCL_DEBUG=INFO to see more"
        )
    if "import" in text or "No module" in text:
        return "install what is missing in the job's Python: `python`, `setup` and `container`"
    return SEE_LOG


def _slow_ones(rates: Sequence[tuple[str, float]], share: float = SLOWEST_SHARE) -> list[str]:
    """Who is well below the others' median, with how far."""
    if len(rates) < 2:
        return []
    middle = median(rate for _, rate in rates)
    return [
        f"{who} {rate:.3g} ({rate / middle:.0%} of the median)"
        for who, rate in rates
        if rate < share * middle
    ]


def _by_node(seen: Seen, check: str) -> dict[str, dict[str, Any]]:
    """The first rank's values of each node."""
    nodes: dict[str, dict[str, Any]] = {}
    for each, values in seen.values(check):
        nodes.setdefault(each.node, values)
    return nodes


def _nodes(seen: Seen) -> Iterator[Finding]:
    nodes = list(_by_node(seen, "machine"))
    asked = seen.resources.nodes
    fine = len(nodes) == asked
    detail = f"{len(nodes)} of {asked}: {_few(nodes)}"
    remedy = "Slurm put ranks elsewhere than `nodes` and `tasks_per_node` say: see `extra`"
    yield Finding("nodes", OK if fine else FAILED, detail, len(nodes), "nodes", remedy)


def _few(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _versions(seen: Seen) -> Iterator[Finding]:
    """What computes must be the same on all nodes; a kernel may differ."""
    nodes = _by_node(seen, "machine")
    differing = []
    for key in (*_EQUAL, *_EQUAL_PACKAGES):
        of_nodes: dict[str, list[str]] = {}
        for node, values in nodes.items():
            value = values["packages"].get(key) if key in _EQUAL_PACKAGES else values.get(key)
            of_nodes.setdefault(str(value), []).append(node)
        if len(of_nodes) > 1:
            parts = [f"{value} on {_few(names)}" for value, names in of_nodes.items()]
            differing.append(f"{key} {'; '.join(parts)}")
    first = next(iter(nodes.values()))
    packages = first["packages"]
    names = [
        f"python {first['python']}",
        *(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages),
        *([f"CUDA {first['cuda']}, driver {first['gpu_driver']}"] if first.get("cuda") else []),
    ]
    kernels = sorted({str(values["kernel"]) for values in nodes.values()})
    detail = f"{', '.join(names)}, kernel {_few(kernels)}; the same on all nodes"
    if differing:
        hardware = all(part.split()[0] in ("cpu", "gpu") for part in differing)
        yield Finding(
            "versions",
            SLOW if hardware else FAILED,
            f"not the same on all nodes: {'. '.join(differing)}",
            remedy="use one environment on all nodes (`python`, `setup`, `container`), and nodes "
            "of one kind (`constraint`, `exclude`): results differ in their last bits otherwise",
        )
    else:
        yield Finding("versions", OK, detail)


def _memory(seen: Seen) -> Iterator[Finding]:
    asked = bytes_of(seen.resources.memory)
    has = {
        node: min(values["memory_bytes"], values["memory_limit_bytes"] or values["memory_bytes"])
        for node, values in _by_node(seen, "machine").items()
    }
    least = min(has, key=lambda node: has[node])
    short = has[least] < 0.97 * asked
    of = f"; `memory` is {seen.resources.memory}" if asked else ""
    detail = f"{has[least] / 1e9:.1f} GB a node at least ({least}){of}"
    remedy = "lower `memory` to what a node has, or choose others (`constraint`, `partition`)"
    yield Finding("memory", FAILED if short else OK, detail, has[least] / 1e9, "GB", remedy)


def _open_files(seen: Seen) -> Iterator[Finding]:
    needed = 256 + 16 * seen.world
    least, who = min((values["open_files"], each.who) for each, values in seen.values("machine"))
    detail = f"{least} may be open ({who}); {seen.world} ranks may need {needed}"
    remedy = "put `ulimit -n 65536` into `setup`, or have the limit raised"
    yield Finding("open files", OK if least >= needed else FAILED, detail, least, "files", remedy)


def _requeue(seen: Seen) -> Iterator[Finding]:
    """The end of a job script asks squeue and scontrol; inside a container nobody can look."""
    relies = seen.executor is ExecutorKind.SLURM and seen.resources.requeues
    if not relies or seen.resources.container:
        return
    without = [node for node, v in _by_node(seen, "machine").items() if not v["slurm_commands"]]
    if without:
        detail = f"no squeue or scontrol on {_few(without)}"
        remedy = "have Slurm's commands on the nodes, or set `requeues` to 0: a job that is ended "
        remedy += "early cannot put itself back into the queue"
        yield Finding("requeue", FAILED, detail, remedy=remedy)
    else:
        yield Finding("requeue", OK, "every node has squeue and scontrol for it")


def _cores(seen: Seen) -> Iterator[Finding]:
    asked = seen.resources.cpus_per_task
    least, who = min((values["allowed_cores"], each.who) for each, values in seen.values("machine"))
    detail = f"{least} a rank at least, `cpus_per_task` is {asked}"
    if least < asked:
        detail = f"{who} may use {least}, `cpus_per_task` is {asked}"
    remedy = "lower `cpus_per_task`, or ask Slurm's administrator how tasks are bound to cores"
    yield Finding("cores", OK if least >= asked else FAILED, detail, least, "cores", remedy)


def _gpus(seen: Seen) -> Iterator[Finding]:
    if not seen.on_gpus:
        return
    # Where `gres` asks for the GPUs, each rank still needs one.
    asked = seen.resources.gpus_per_node or seen.resources.tasks_per_node
    short = [
        f"{each.who} sees {values['visible']}"
        for each, values in seen.values("compute")
        if values["visible"] < asked
    ]
    kinds = sorted({values["gpu"] for _, values in seen.values("compute")})
    memory = min(values["memory"] for _, values in seen.values("compute")) / 1e9
    detail = f"{asked} a node, {' and '.join(kinds)}, {memory:.0f} GB each at least"
    remedy = "see `gpus_per_node`, `gres` and `constraint` in the profile"
    if short:
        detail = f"{asked} a node are needed, {_few(short)}"
    verdict = FAILED if short else OK if len(kinds) == 1 else SLOW
    yield Finding("GPUs", verdict, detail, seen.world, "GPUs", remedy)
    key = "ecc.errors.uncorrected.volatile.total"
    gpus = [
        (node, gpu) for node, values in _by_node(seen, "machine").items() for gpu in values["gpus"]
    ]
    errors = {
        f"GPU {gpu['index']} of {node}": int(gpu[key])
        for node, gpu in gpus
        if gpu.get(key, "").isdigit()
    }
    bad = [f"{name}: {count}" for name, count in errors.items() if count]
    if errors:
        detail = f"no uncorrected error on {len(errors)} GPUs" if not bad else _few(bad)
        remedy = "have that GPU reset or taken out; until then name its node in `exclude`"
        yield Finding("GPU memory (ECC)", FAILED if bad else OK, detail, len(bad), "GPUs", remedy)


def _matmul(seen: Seen) -> Iterator[Finding]:
    what = "GPU" if seen.on_gpus else "rank"
    results = seen.values("compute")
    wrong = [
        f"{each.who}: off by {values['error']:.2g}"
        + ("" if values["repeats"] else ", another result each time")
        for each, values in results
        if not values["error"] <= MATMUL_ERROR[values["dtype"]] or not values["repeats"]
    ]
    kinds: dict[str, dict[str, list[str]]] = {}
    for each, values in results:
        kinds.setdefault(str(values.get("gpu")), {}).setdefault(values["digest"], []).append(
            each.who
        )
    for of_digest in kinds.values():
        # Of processors nothing is known of their kind here, so only GPUs are held to the bit.
        if seen.on_gpus and len(of_digest) > 1:
            odd = min(of_digest.values(), key=len)
            wrong.append(f"{_few(odd)}: other bits than GPUs of the same kind")
    remedy = f"that {what} computes wrongly: have it taken out, and name its node in `exclude`"
    largest = max(values["error"] for _, values in results)
    first = results[0][1]
    detail = f"right to {largest:.1g} in {first['dtype']}, the same every time"
    verdict = FAILED if wrong else OK
    yield Finding("matrix product", verdict, "; ".join(wrong) or detail, largest, "", remedy)
    rates = [(each.who, float(values["tflops"])) for each, values in results]
    slow = _slow_ones(rates)
    middle = median(rate for _, rate in rates)
    detail = f"{middle:.3g} TFLOP/s a {what}, the slowest {min(rate for _, rate in rates):.3g}"
    remedy = f"see clocks, temperature and other users of that {what}; `exclude` its node meanwhile"
    slow_detail = f"{_few(slow)}; the median is {middle:.3g} TFLOP/s"
    yield Finding(
        "matrix rate",
        SLOW if slow else OK,
        slow_detail if slow else detail,
        middle,
        "TFLOP/s",
        remedy,
    )


def _collectives(seen: Seen) -> Iterator[Finding]:
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
            verdict, detail = FAILED, f"{backend}: {_few(wrong)}"
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
            verdict, detail = SLOW, f"{detail}; {_few(slow)}"
            compare = "`nvidia-smi topo -m`" if backend == "nccl" else "what else runs"
            remedy = f"compare {compare} on these nodes; `exclude` them meanwhile"
        yield Finding(f"collectives, {words}", verdict, detail, rate, "GB/s", remedy)


def _slow_nodes(rows: Sequence[tuple[Measurement, dict[str, Any]]], largest: int) -> list[str]:
    rates: dict[str, float] = {}
    for each, row in rows:
        if row["operation"] == "all-reduce" and row["bytes"] == largest:
            rates[each.node] = min(rates.get(each.node, row["gb_per_s"]), row["gb_per_s"])
    return _slow_ones(list(rates.items()))


def _clocks(seen: Seen) -> Iterator[Finding]:
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


def _disks(seen: Seen) -> Iterator[Finding]:
    for name in seen.of_first("disk"):
        nodes = {each.node: v[name] for each, v in seen.values("disk") if v[name]}
        yield from _disk(name, nodes)


def _disk(name: str, nodes: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    for way in ("write", "read"):
        alone = [(node, float(values[f"{way}_alone"])) for node, values in nodes.items()]
        together = sum(values[f"{way}_together"] for values in nodes.values())
        least = min(rate for _, rate in alone)
        slow = _slow_ones(alone, SLOWEST_SHARE_OF_DISK)
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
            detail += f"; {_few(slow)}"
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
    yield Finding(f"disk {name}, locks", verdict, _few(bad) or detail, remedy=remedy)


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
        return Finding(check, FAILED, _few(blind), None, "s", remedy)
    detail = f"within {longest:.2g} s"
    remedy = "NFS caches that long: mount with lookupcache=positive and a shorter actimeo; "
    remedy += "everything works, but the ranks find each other late"
    return Finding(check, OK if longest <= SEEN_SOON_S else SLOW, detail, longest, "s", remedy)


def _training(seen: Seen) -> Iterator[Finding]:
    alone, ranks = seen.of_first("alone"), seen.of_first("together")
    losses = _apart(alone["history"], ranks["history"])
    weights = _relative(ranks["apart"])
    how = f"`sharding` {seen.resources.sharding}"
    words = f"{seen.world} ranks ({how})" if seen.world > 1 else f"this rank ({how})"
    detail = (
        f"{words} and one process: losses {losses:.1g} apart, weights {weights:.1g} "
        f"of what {len(ranks['history'])} steps moved them"
    )
    fine = losses <= LOSS_APART and weights <= WEIGHTS_APART
    remedy = (
        "do not train here with several ranks: compare versions, look at the collectives above, "
        "and try `sharding: none`"
    )
    yield Finding("ranks equal one", OK if fine else FAILED, detail, weights, "", remedy)


def _apart(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """The largest relative difference of any step's metrics; infinite if steps are missing."""
    if len(one) != len(other):
        return float("inf")
    return max(
        abs(mine[name] - other_step.get(name, float("inf"))) / max(abs(mine[name]), 1e-9)
        for mine, other_step in zip(one, other, strict=True)
        for name in ("loss", "grad_norm")
    )


def _relative(apart: Mapping[str, float]) -> float:
    return apart["weights"] / apart["moved"] if apart.get("moved") else float("inf")


def _sampler(seen: Seen, check: str = "sampler") -> Iterator[Finding]:
    results = seen.values(check)
    gap, who = max((values["mean"], each.who) for each, values in results)
    first = results[0][1]
    limit = LOGPROBS_APART[first["precision"]]
    detail = (
        f"{first['engine']} in {first['precision']}: log-probs {gap:.1g} apart on average, "
        f"{max(values['largest'] for _, values in results):.1g} at most"
    )
    if gap > limit:
        detail += f", on {who} (up to {limit:g} may be rounding)"
    remedy = "the update would learn from wrong ratios: see versions, and try rollout.engine: "
    remedy += "vllm" if first["engine"] == "torch" else "torch"
    name = "sampler equals trainer" + (", vLLM" if check == "vllm" else "")
    yield Finding(name, OK if gap <= limit else FAILED, detail, gap, "nats", remedy)


def _death(seen: Seen) -> Iterator[Finding]:
    lost = seen.world - 1
    results = seen.values("killed")
    dead = results[lost][1]
    if dead["exit_status"] != -9:
        said = f": {dead['error']}" if dead["error"] else ""
        detail = f"rank {lost} was to be killed and ended with {dead['exit_status']}{said}"
        yield Finding("a rank dies", FAILED, detail, remedy=SEE_LOG)
        return
    if seen.world == 1:
        yield Finding("a rank dies", OK, "killed in the midst of training; nobody is left")
        return
    survivors = results[:lost]
    limit = seen.collective_seconds + HEARD_S
    silent = [
        f"{each.who} said {values['error'] or 'nothing'}"
        for each, values in survivors
        if not re.search(rf"\brank {lost}\b", values["error"] or "")
    ]
    longest = max(values["waited_s"] or 0.0 for _, values in survivors)
    detail = f"the others named rank {lost} within {longest:.1f} s"
    if silent:
        detail = f"rank {lost} was killed, and {_few(silent)}"
    verdict = FAILED if silent else OK if longest <= limit else SLOW
    remedy = "a lost rank costs the job's whole time limit here: lower `collective_seconds`, and "
    remedy += "see that the ledger's folder is visible to all nodes"
    yield Finding("a rank dies", verdict, detail, longest, "s", remedy)


def _resume(seen: Seen) -> Iterator[Finding]:
    undisturbed, resumed = seen.of_first("together"), seen.of_first("resumed")
    step = resumed["resumed_from"]
    begins = f"went on from step {step}" if step else "found no checkpoint"
    equal = undisturbed["digest"] == resumed["digest"]
    weights = _relative(resumed["apart"])
    detail = f"{begins} and ended with the bytes of the run that was not killed"
    verdict = OK if step and equal else FAILED
    if not equal:
        detail = f"{begins} and ended {weights:.1g} of what training moved apart"
        if step and not seen.resources.deterministic and weights <= WEIGHTS_APART:
            verdict, detail = OK, f"{detail}, which is rounding: `deterministic` is false"
    remedy = "see the disk's checks above; with `deterministic: true` and equal bytes nothing else "
    remedy += "than the checkpoint can differ"
    yield Finding("kill and resume", verdict, detail, step, "steps", remedy)


_JUDGES: dict[tuple[str, ...], tuple[Judge, ...]] = {
    ("machine",): (_nodes, _versions, _cores, _memory, _open_files, _requeue),
    ("machine", "compute"): (_gpus, _matmul),
    ("collectives",): (_collectives, _clocks),
    ("disk",): (_disks,),
    ("alone", "together"): (_training,),
    ("sampler",): (_sampler,),
    ("vllm",): (lambda seen: _sampler(seen, "vllm"),),
    ("killed",): (_death,),
    ("together", "resumed"): (_resume,),
}
"""What is judged of which measurements."""
