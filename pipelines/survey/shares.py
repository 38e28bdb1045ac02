"""Which part of a node a job asks for, so that all jobs fit side by side: GPUs, cores, memory."""

from collections.abc import Sequence

from pipelines.base.errors import LockstepError
from pipelines.survey.draft import Setting
from pipelines.survey.offers import Offer, gpus_of
from pipelines.survey.values import Cluster, Node, Partition, least
from pipelines.survey.words import names, size

PROCESSORS = 8
"""Cores of a stage that trains without a GPU; more of them make a small model no faster."""
LEAST_MEMORY_MB = 16
"""Less than that is no memory, but a site that has not told Slurm how much there is."""


def on_gpus(cluster: Cluster, best: Offer, wanted: int) -> list[Setting]:
    """Of a stage that needs one GPU; its nodes must have as many as the largest stage wants."""
    nodes = [
        node
        for node in best.nodes
        if gpus_of(node, best.kind) >= wanted <= cpus_of(best.partition, node)
    ]
    if not nodes:
        raise LockstepError(f"--gpus {wanted}: {best.partition.name} has too few CPUs on a node")
    has = names(str(count) for count in sorted({gpus_of(node, best.kind) for node in nodes}))
    settings = gpu_request(cluster, best, 1, f"most stages use one; nodes have {has}")
    cpus, cpus_why = _least_share(nodes, [cpus_of(best.partition, node) for node in nodes], "CPUs")
    settings.append(Setting("cpus_per_task", max(1, cpus), cpus_why))
    shares = [memory_of(best.partition, node) for node in nodes]
    memory, memory_why = _least_share(nodes, shares, "memory")
    settings.append(memory_of_job(best.partition, memory, max(1, cpus), memory_why))
    return [*settings, _gpu_memory(best)]


def on_processors(best: Offer) -> list[Setting]:
    cpus = min(PROCESSORS, *(cpus_of(best.partition, node) for node in best.nodes))
    node = min(best.nodes, key=lambda node: node.memory_mb / node.cpus)
    memory = memory_of(best.partition, node) * cpus // node.cpus
    why = f"the share of {cpus} CPUs, of {size(node.memory_mb)} of a node with {node.cpus}"
    return [
        Setting("cpus_per_task", cpus, f"of {node.cpus} of a node"),
        memory_of_job(best.partition, memory, cpus, why),
    ]


def gpu_request(cluster: Cluster, best: Offer, count: int, why: str) -> list[Setting]:
    """How a job asks for GPUs, of this type alone where the partition has several."""
    typed = any(gpus.kind and gpus.kind == best.kind for node in best.nodes for gpus in node.gpus)
    gres = f"gpu:{best.kind}:{count}" if typed else f"gpu:{count}"
    if not cluster.settings.select_type.endswith("cons_tres"):
        other = cluster.settings.select_type.rpartition("/")[2]
        return [Setting("gres", gres, f"{why}; {other} knows no --gpus-per-node")]
    if not best.other_kinds:
        return [Setting("gpus_per_node", count, why)]
    others = f"the partition also has {names(kind or 'unnamed GPUs' for kind in best.other_kinds)}"
    if feature := _own_feature(cluster, best):
        constraint = Setting("constraint", feature, f"{others}; one kind gives the same bytes")
        return [Setting("gpus_per_node", count, why), constraint]
    # sbatch refuses a number of GPUs beside a number of GPUs of a type.
    return [Setting("gres", gres, f"in place of gpus_per_node, for one kind: {others}; {why}")]


def _own_feature(cluster: Cluster, best: Offer) -> str | None:
    """A feature that all nodes with these GPUs have, and no other node of the partition."""
    if any(len(node.gpus) > 1 for node in best.nodes):
        return None
    mine = {node.name for node in best.nodes}
    everywhere = [node for node in cluster.nodes if best.partition.name in node.partitions]
    common = set.intersection(*(set(node.features) for node in best.nodes))
    own = sorted(common.difference(*(n.features for n in everywhere if n.name not in mine)))
    return next((name for name in own if name in best.kind or best.kind in name), (*own, None)[0])


def cpus_of(partition: Partition, node: Node) -> int:
    """That a job of the partition may have on this node."""
    return least((node.cpus, partition.max_cpus_per_node)) or 1


def memory_of(partition: Partition, node: Node) -> int:
    """Megabytes that a job of the partition may have on this node."""
    return least((node.memory_mb, partition.max_memory_per_node_mb)) or 0


def _least_share(nodes: Sequence[Node], amounts: Sequence[int], what: str) -> tuple[int, str]:
    """What one GPU has of it on every node, and the words for it."""
    share, amount, count = min(
        (amount // node.num_gpus, amount, node.num_gpus)
        for node, amount in zip(nodes, amounts, strict=True)
    )
    whole = str(amount) if what == "CPUs" else size(amount)
    kinds = {(amount, node.num_gpus) for node, amount in zip(nodes, amounts, strict=True)}
    where = "a node's" if len(kinds) == 1 else "the smallest share:"
    return share, f"{where} {whole} {what} / {count} GPUs"


def memory_of_job(partition: Partition, share_mb: int, cpus: int, why: str) -> Setting:
    if share_mb < LEAST_MEMORY_MB:
        why = "Slurm is not told here how much memory the nodes have"
        return Setting("memory", "64G", why, is_advice=True)
    if (most := partition.max_memory_per_cpu_mb) and most * cpus < share_mb:
        text = f"{cpus} CPUs, each with the {most}M that {partition.name} allows"
        return Setting("memory", size(most * cpus), text)
    return Setting("memory", size(share_mb), why)


def _gpu_memory(best: Offer) -> Setting:
    kind, memory = best.kind or "the GPU", best.memory
    if memory.gib is not None:
        why = f"of one {kind}: what needs more is refused before it is queued"
        return Setting("gpu_memory", f"{memory.gib}G", why)
    sizes = " or ".join(f"{each}G" for each in memory.sizes)
    why = f"{kind} has {sizes}: `nvidia-smi` says" if sizes else "not known here: `nvidia-smi` says"
    value = f"{min(memory.sizes, default=80)}G"
    return Setting("gpu_memory", value, f"{why}; what needs more is then refused", is_advice=True)
