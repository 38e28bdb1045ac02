"""Findings about the nodes themselves: number, versions, cores, memory, GPUs, matrix products."""

from collections.abc import Iterator
from statistics import median

from pipelines.config.profiles import ExecutorKind, bytes_of
from pipelines.selftest.finding import Finding
from pipelines.selftest.seen import (
    FAILED,
    OK,
    SLOW,
    Seen,
    by_node,
    few,
    slow_ones,
)

MATMUL_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
_EQUAL = ("python", "cuda", "gpu_driver", "gpu", "cpu")
_EQUAL_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def nodes(seen: Seen) -> Iterator[Finding]:
    nodes = list(by_node(seen, "machine"))
    asked = seen.resources.nodes
    fine = len(nodes) == asked
    detail = f"{len(nodes)} of {asked}: {few(nodes)}"
    remedy = "Slurm put ranks elsewhere than `nodes` and `tasks_per_node` say: see `extra`"
    yield Finding("nodes", OK if fine else FAILED, detail, len(nodes), "nodes", remedy)


def versions(seen: Seen) -> Iterator[Finding]:
    """What computes must be the same on all nodes; a kernel may differ."""
    nodes = by_node(seen, "machine")
    differing = []
    for key in (*_EQUAL, *_EQUAL_PACKAGES):
        of_nodes: dict[str, list[str]] = {}
        for node, values in nodes.items():
            value = values["packages"].get(key) if key in _EQUAL_PACKAGES else values.get(key)
            of_nodes.setdefault(str(value), []).append(node)
        if len(of_nodes) > 1:
            parts = [f"{value} on {few(names)}" for value, names in of_nodes.items()]
            differing.append(f"{key} {'; '.join(parts)}")
    first = next(iter(nodes.values()))
    packages = first["packages"]
    names = [
        f"python {first['python']}",
        *(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages),
        *([f"CUDA {first['cuda']}, driver {first['gpu_driver']}"] if first.get("cuda") else []),
    ]
    kernels = sorted({str(values["kernel"]) for values in nodes.values()})
    detail = f"{', '.join(names)}, kernel {few(kernels)}; the same on all nodes"
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


def memory(seen: Seen) -> Iterator[Finding]:
    asked = bytes_of(seen.resources.memory)
    has = {
        node: min(values["memory_bytes"], values["memory_limit_bytes"] or values["memory_bytes"])
        for node, values in by_node(seen, "machine").items()
    }
    least = min(has, key=lambda node: has[node])
    short = has[least] < 0.97 * asked
    of = f"; `memory` is {seen.resources.memory}" if asked else ""
    detail = f"{has[least] / 1e9:.1f} GB a node at least ({least}){of}"
    remedy = "lower `memory` to what a node has, or choose others (`constraint`, `partition`)"
    yield Finding("memory", FAILED if short else OK, detail, has[least] / 1e9, "GB", remedy)


def open_files(seen: Seen) -> Iterator[Finding]:
    needed = 256 + 16 * seen.world
    least, who = min((values["open_files"], each.who) for each, values in seen.values("machine"))
    detail = f"{least} may be open ({who}); {seen.world} ranks may need {needed}"
    remedy = "put `ulimit -n 65536` into `setup`, or have the limit raised"
    yield Finding("open files", OK if least >= needed else FAILED, detail, least, "files", remedy)


def requeue(seen: Seen) -> Iterator[Finding]:
    """The end of a job script asks squeue and scontrol; inside a container nobody can look."""
    may = seen.resources.requeue and seen.resources.requeues
    relies = seen.executor is ExecutorKind.SLURM and may
    if not relies or seen.resources.container:
        return
    without = [node for node, v in by_node(seen, "machine").items() if not v["slurm_commands"]]
    if without:
        detail = f"no squeue or scontrol on {few(without)}"
        remedy = "have Slurm's commands on the nodes, or set `requeue` to false: a job that is "
        remedy += "ended early cannot put itself back into the queue"
        yield Finding("requeue", FAILED, detail, remedy=remedy)
    else:
        yield Finding("requeue", OK, "every node has squeue and scontrol for it")


def cores(seen: Seen) -> Iterator[Finding]:
    asked = seen.resources.cpus_per_task
    least, who = min((values["allowed_cores"], each.who) for each, values in seen.values("machine"))
    detail = f"{least} a rank at least, `cpus_per_task` is {asked}"
    if least < asked:
        detail = f"{who} may use {least}, `cpus_per_task` is {asked}"
    remedy = "lower `cpus_per_task`, or ask Slurm's administrator how tasks are bound to cores"
    yield Finding("cores", OK if least >= asked else FAILED, detail, least, "cores", remedy)


def gpus(seen: Seen) -> Iterator[Finding]:
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
        detail = f"{asked} a node are needed, {few(short)}"
    verdict = FAILED if short else OK if len(kinds) == 1 else SLOW
    yield Finding("GPUs", verdict, detail, seen.world, "GPUs", remedy)
    key = "ecc.errors.uncorrected.volatile.total"
    gpus = [
        (node, gpu) for node, values in by_node(seen, "machine").items() for gpu in values["gpus"]
    ]
    errors = {
        f"GPU {gpu['index']} of {node}": int(gpu[key])
        for node, gpu in gpus
        if gpu.get(key, "").isdigit()
    }
    bad = [f"{name}: {count}" for name, count in errors.items() if count]
    if errors:
        detail = f"no uncorrected error on {len(errors)} GPUs" if not bad else few(bad)
        remedy = "have that GPU reset or taken out; until then name its node in `exclude`"
        yield Finding("GPU memory (ECC)", FAILED if bad else OK, detail, len(bad), "GPUs", remedy)


def matmul(seen: Seen) -> Iterator[Finding]:
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
            wrong.append(f"{few(odd)}: other bits than GPUs of the same kind")
    remedy = f"that {what} computes wrongly: have it taken out, and name its node in `exclude`"
    largest = max(values["error"] for _, values in results)
    first = results[0][1]
    detail = f"right to {largest:.1g} in {first['dtype']}, the same every time"
    verdict = FAILED if wrong else OK
    yield Finding("matrix product", verdict, "; ".join(wrong) or detail, largest, "", remedy)
    rates = [(each.who, float(values["tflops"])) for each, values in results]
    slow = slow_ones(rates)
    middle = median(rate for _, rate in rates)
    detail = f"{middle:.3g} TFLOP/s a {what}, the slowest {min(rate for _, rate in rates):.3g}"
    remedy = f"see clocks, temperature and other users of that {what}; `exclude` its node meanwhile"
    slow_detail = f"{few(slow)}; the median is {middle:.3g} TFLOP/s"
    yield Finding(
        "matrix rate",
        SLOW if slow else OK,
        slow_detail if slow else detail,
        middle,
        "TFLOP/s",
        remedy,
    )
