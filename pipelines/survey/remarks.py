"""What the head of a profile says about the cluster: its partitions, and what they are like."""

from collections.abc import Iterator

from pipelines.survey.draft import Setting
from pipelines.survey.offers import Offer, Wishes, name_of, obstacle
from pipelines.survey.times import of_preemption
from pipelines.survey.values import Cluster, Node, Partition
from pipelines.survey.words import names, size, span

SHOWN = 20
"""Partitions in the table."""
MUCH_DISK_MB = 100 << 10


def of_cluster(cluster: Cluster, best: Offer, wishes: Wishes) -> Iterator[str]:
    yield from _table(cluster, wishes)
    yield of_preemption(cluster, best)
    if best.partition.whole_nodes:
        yield f"Jobs in {best.partition.name} get whole nodes, whatever they ask for."
    if not best.num_gpus and wishes.gpus != 0:
        where = wishes.partition or "any partition that takes your jobs"
        yield (
            f"Slurm counts no GPUs (GRES) in {where}, so this profile is for CPUs. If the nodes "
            "have some all the same, set `device: cuda`, and ask for them as your site does."
        )


def _table(cluster: Cluster, wishes: Wishes) -> Iterator[str]:
    width = max(len(each.name) for each in cluster.partitions)
    lines = ["Partitions:"]
    for partition in cluster.partitions[:SHOWN]:
        limit = span(partition.max_minutes) if partition.max_minutes else "no time limit"
        wrong = obstacle(cluster, partition, wishes)
        text = f"closed: {wrong}" if wrong else f"{_nodes(cluster, partition)}; {limit}"
        lines.append(f"  {partition.name:<{width}}  {text}")
    if (more := len(cluster.partitions) - SHOWN) > 0:
        lines.append(f"  and {more} more")
    yield "\n".join(lines)


def _nodes(cluster: Cluster, partition: Partition) -> str:
    """Nodes that are alike in one phrase."""
    counts: dict[str, int] = {}
    for node in cluster.nodes_of(partition):
        counts[_shape(node)] = counts.get(_shape(node), 0) + 1
    return names(f"{count} x ({shape})" for shape, count in counts.items())


def _shape(node: Node) -> str:
    gpus = [f"{each.count} {name_of(node, each) or 'GPUs'}" for each in node.gpus]
    return " + ".join([*gpus, f"{node.cpus} CPUs", size(node.memory_mb)])


def local_disk(cluster: Cluster, best: Offer) -> list[Setting]:
    """What the nodes have of their own, for those who want to use it."""
    folder = cluster.settings.temporary_folder
    disks = sorted({node.disk_mb for node in best.nodes if node.disk_mb > 0})
    if not disks:
        return []
    has = size(disks[0]) if len(disks) == 1 else f"{size(disks[0])} to {size(disks[-1])}"
    why = f"nodes have {has} at {folder} (TmpFS); this asks for so much of it free"
    much = size(min(MUCH_DISK_MB, disks[0] // 2))
    return [Setting("extra", f"{{tmp: {much}}}", why, is_advice=True)]


def offer_in_words(offer: Offer) -> str:
    limit = span(offer.max_minutes) if offer.max_minutes else "no time limit"
    memory = f" of {offer.memory.gib}G" if offer.memory.gib else ""
    what = f"{offer.num_gpus} {offer.kind or 'GPUs'}{memory}"
    nodes = "1 node" if len(offer.nodes) == 1 else f"{len(offer.nodes)} nodes"
    return f"{offer.partition.name}: {what} on {nodes}; {limit}"
