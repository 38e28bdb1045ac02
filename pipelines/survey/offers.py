"""What each partition offers this user: the GPUs there, the limits, and who may preempt.

An offer is made of one type of GPU in one partition, or of a partition without GPUs. What keeps a
user out of a partition is said in words, for the error that names it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.survey.gpus import GpuMemory, memory_of, model_in
from pipelines.survey.values import NO_LIMITS, Cluster, Gpus, Limits, Node, Partition, least

LEAST_MINUTES = 3
"""Of a job: Slurm may send its warning a minute early, and the stage has to save after it."""
LONG_ENOUGH_MINUTES = 60
"""A partition with a lower limit is one for tests."""


@dataclass(frozen=True)
class Wishes:
    """What the user has asked for."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: int | None = None
    """Of a stage that trains; 0: none at all."""
    minutes: int | None = None


@dataclass(frozen=True)
class Rights:
    """How a job may enter a partition."""

    account: str | None
    qos: str | None
    """Those of the job; None: accounting names none, or there is none."""
    other_accounts: tuple[str, ...] = ()
    other_qos: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    """Of account, QOS and the partition's own QOS together."""


@dataclass(frozen=True)
class Offer:
    partition: Partition
    rights: Rights
    has_gpus: bool
    """Whether jobs would ask for GPUs."""
    kind: str
    """The type of GPU; empty: not named."""
    nodes: tuple[Node, ...]
    """With such GPUs; else those without any, or all where none is without."""
    num_plain: int
    """Nodes of the partition without any GPU."""
    other_kinds: tuple[str, ...]
    """The other types of GPU in the partition."""
    memory: GpuMemory
    preemptor: str | None
    """Whose jobs preempt those of this offer; None: nobody's."""

    @property
    def num_gpus(self) -> int:
        return sum(gpus_of(node, self.kind) for node in self.nodes) if self.has_gpus else 0

    @property
    def max_minutes(self) -> int | None:
        return least((self.partition.max_minutes, self.rights.limits.minutes))

    @property
    def gpu_name(self) -> str:
        return self.kind or "GPU"


def gpus_of(node: Node, kind: str) -> int:
    return sum(each.count for each in node.gpus if name_of(node, each) == kind)


def name_of(node: Node, gpus: Gpus) -> str:
    """The type that GRES has, else the GPU that a feature of the node is named after."""
    named = (feature for feature in node.features if model_in(feature))
    return gpus.kind or next(named, "")


def obstacle(cluster: Cluster, partition: Partition, wishes: Wishes) -> str | None:
    """Why a partition takes no job of this user now; None if it does."""
    wrong = None
    if partition.state != "UP":
        wrong = f"it is {partition.state}"
    elif partition.for_root:
        wrong = "only root may submit there"
    elif partition.needs_reservation:
        wrong = "it takes only jobs with a reservation"
    elif cluster.groups and not any(map(partition.groups.take, cluster.groups)):
        wrong = f"only for the groups {', '.join(partition.groups.allowed or ())}"
    elif not cluster.nodes_of(partition):
        wrong = "none of its nodes is up"
    elif rights_in(cluster, partition, wishes) is None:
        wrong = "not for your accounts and QOS"
    return wrong


def rights_in(cluster: Cluster, partition: Partition, wishes: Wishes) -> Rights | None:
    """By which account and QOS this user gets in; None if by none."""
    accounting = cluster.accounting
    if accounting is None or not accounting.associations:
        account, qos = wishes.account, wishes.qos
        fits = (not account or partition.accounts.take(account)) and (
            not qos or partition.qos.take(qos)
        )
        return Rights(account, qos) if fits else None
    ways = []
    for mine in accounting.associations:
        if mine.partition not in ("", partition.name) or not partition.accounts.take(mine.account):
            continue
        if wishes.account and mine.account != wishes.account:
            continue
        usable = [name for name in mine.qos if partition.qos.take(name)]
        if wishes.qos:
            usable = [name for name in usable if name == wishes.qos]
        if not usable and (mine.qos or partition.qos.allowed is not None):
            continue
        # Without a default of its own, an association has the cluster's, which is called normal.
        first = next((n for n in (mine.default_qos, "normal") if n in usable), (*usable, None)[0])
        ways.append((mine, first, tuple(name for name in usable if name != first)))
    if not ways:
        return None
    # The user's default account first, and what is for this partition alone before the rest.
    ways.sort(key=lambda way: (way[0].account != accounting.default_account, not way[0].partition))
    mine, qos, other_qos = ways[0]
    limits = mine.limits
    for name in (qos, partition.own_qos):
        if found := accounting.qos_named(name):
            limits = limits.within(found.limits)
    others = dict.fromkeys(way[0].account for way in ways if way[0].account != mine.account)
    return Rights(mine.account, qos, tuple(others), other_qos, limits)


def offers(cluster: Cluster, wishes: Wishes) -> list[Offer]:
    """All that this user can have, in no particular order."""
    found: list[Offer] = []
    for partition in cluster.partitions:
        rights = rights_in(cluster, partition, wishes)
        if wishes.partition not in (None, partition.name):
            continue
        if rights is not None and obstacle(cluster, partition, wishes) is None:
            found += _offers_of(cluster, partition, rights)
            if wishes.gpus == 0 and all(node.gpus for node in cluster.nodes_of(partition)):
                found.append(_without_gpus(cluster, partition, rights))
    return [each for each in found if (each.max_minutes or LEAST_MINUTES) >= LEAST_MINUTES]


def _offers_of(cluster: Cluster, partition: Partition, rights: Rights) -> Iterator[Offer]:
    nodes = cluster.nodes_of(partition)
    kinds = sorted({name_of(node, each) for node in nodes for each in node.gpus})
    plain = tuple(node for node in nodes if not node.gpus)
    preemptor = _preemptor(cluster, partition, rights)
    for kind in kinds:
        having = tuple(node for node in nodes if gpus_of(node, kind))
        # A feature of one node says nothing about the GPUs of another.
        common = set.intersection(*(set(node.features) for node in having))
        others, memory = tuple(k for k in kinds if k != kind), memory_of(kind, common)
        yield Offer(partition, rights, True, kind, having, len(plain), others, memory, preemptor)
    if plain:
        yield _without_gpus(cluster, partition, rights)


def _without_gpus(cluster: Cluster, partition: Partition, rights: Rights) -> Offer:
    nodes = cluster.nodes_of(partition)
    plain = tuple(node for node in nodes if not node.gpus)
    return Offer(
        partition=partition,
        rights=rights,
        has_gpus=False,
        kind="",
        nodes=plain or tuple(nodes),
        num_plain=len(plain),
        other_kinds=(),
        memory=GpuMemory(None),
        preemptor=_preemptor(cluster, partition, rights),
    )


def _preemptor(cluster: Cluster, partition: Partition, rights: Rights) -> str | None:
    by = cluster.settings.preempt_type
    if by == "preempt/partition_prio" and partition.preempt_mode != "OFF":
        places = {name for node in cluster.nodes_of(partition) for name in node.partitions}
        higher = [
            other.name
            for other in cluster.partitions
            if other.name in places and other.tier > partition.tier
        ]
        return f"partition {', '.join(higher)}" if higher else None
    if by == "preempt/qos" and cluster.accounting:
        higher = [each.name for each in cluster.accounting.qos if rights.qos in each.preempts]
        return f"QOS {', '.join(higher)}" if higher else None
    return None


def preempt_mode(cluster: Cluster, offer: Offer) -> str:
    """What preemption does to a job of this offer: REQUEUE, CANCEL, SUSPEND."""
    mode = offer.partition.preempt_mode
    if cluster.settings.preempt_type == "preempt/qos" and cluster.accounting:
        qos = cluster.accounting.qos_named(offer.rights.qos)
        mode = "cluster" if qos is None else qos.preempt_mode
        mode = cluster.settings.preempt_mode if mode == "cluster" else mode
    words = [word for word in mode.upper().split(",") if word != "GANG"]
    return words[0] if words else "SUSPEND"
