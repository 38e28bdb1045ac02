"""Which offer is the sensible one where nobody has chosen, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.base.errors import LockstepError
from pipelines.survey.offers import (
    LONG_ENOUGH_MINUTES,
    Offer,
    Wishes,
    gpus_of,
    obstacle,
    offers,
)
from pipelines.survey.values import Cluster
from pipelines.survey.words import names, span


@dataclass(frozen=True)
class Ranked:
    """The offers of a cluster, the best first, and the reason why the first is."""

    offers: tuple[Offer, ...]
    why: str

    @property
    def equals(self) -> list[Offer]:
        """Those that a user might as well choose: as many as are no worse in kind than the best."""
        best = self.offers[0]
        alike = [each for each in self.offers if _class(each) == _class(best)]
        return alike if best.num_gpus else []


def rank(cluster: Cluster, wishes: Wishes) -> Ranked:
    """Refuses with every partition's reason where this user can have nothing."""
    if not cluster.partitions:
        raise LockstepError("Slurm shows no partition here; see `sinfo`, `scontrol show partition`")
    if wishes.partition:
        _check_partition(cluster, wishes, wishes.partition)
    found = sorted(offers(cluster, wishes), key=_key)
    if not found:
        raise LockstepError(_nothing(cluster, wishes))
    with_gpus = _large_enough([each for each in found if each.num_gpus], wishes)
    if wishes.gpus and not with_gpus:
        where = wishes.partition or "any partition that takes your jobs"
        raise LockstepError(f"--gpus {wishes.gpus}: Slurm counts no GPUs (GRES) in {where}")
    if with_gpus and wishes.gpus != 0:
        return Ranked(tuple(with_gpus), "as you asked" if wishes.partition else _why(with_gpus))
    plain = [each for each in found if not each.num_gpus]
    return Ranked(tuple(plain), "as you asked" if wishes.partition else why_for_processors(plain))


def _check_partition(cluster: Cluster, wishes: Wishes, name: str) -> None:
    partition = cluster.partition_named(name)
    if partition is None:
        known = names(each.name for each in cluster.partitions)
        raise LockstepError(f"--partition {name}: the cluster has no such partition, but {known}")
    if wrong := obstacle(cluster, partition, wishes):
        raise LockstepError(f"--partition {name}: {wrong}; see `scontrol show partition {name}`")


def processors(cluster: Cluster, wishes: Wishes) -> Offer | None:
    """Nodes without GPUs for what needs none; None where there is no such partition."""
    unbound = Wishes(account=wishes.account, qos=wishes.qos)
    found = [each for each in offers(cluster, unbound) if not each.num_gpus]
    return min(found, key=_key, default=None)


def why_for_processors(found: Sequence[Offer]) -> str:
    best = found[0]
    if len(found) == 1:
        return "the only partition that takes your jobs"
    if best.partition.is_default:
        return "the cluster's default partition"
    return "the most nodes, of the partitions that take your jobs"


def _large_enough(found: list[Offer], wishes: Wishes) -> list[Offer]:
    """Those that have what was asked for by number; all where none has, for the error to name."""
    enough = [each for each in found if _has(each, wishes)]
    return enough or found


def _has(offer: Offer, wishes: Wishes) -> bool:
    allowed, minutes = offer.rights.limits.gpus, offer.max_minutes
    return (
        max(gpus_of(node, offer.kind) for node in offer.nodes) >= (wishes.gpus or 1)
        and (allowed is None or allowed >= (wishes.gpus or 1))
        and (minutes is None or minutes >= (wishes.minutes or 0))
    )


def _is_short(offer: Offer) -> bool:
    return offer.max_minutes is not None and offer.max_minutes < LONG_ENOUGH_MINUTES


def _class(offer: Offer) -> tuple[bool, bool, bool]:
    """What makes an offer worse in kind. Jobs without GPUs must not keep GPUs from others."""
    return (offer.preemptor is not None, _is_short(offer), bool(offer.num_plain))


def _key(offer: Offer) -> tuple[bool | int | str, ...]:
    memory = offer.memory.gib or min(offer.memory.sizes, default=0)
    default = offer.partition.is_default
    if not offer.num_gpus:
        return (*_class(offer)[:2], not default, -len(offer.nodes), offer.partition.name)
    return (
        *_class(offer)[:2],
        # Several types of GPU in one partition are no reason against it; nodes without are.
        bool(offer.num_plain),
        -memory,
        -offer.num_gpus,
        not default,
        offer.partition.tier,
        offer.partition.name,
    )


def _why(found: Sequence[Offer]) -> str:
    best = found[0]
    others = [each for each in found[1:] if each.partition is not best.partition]
    if not others:
        return "the only partition with GPUs that takes your jobs"
    second = others[0]
    place = next(n for n, (a, b) in enumerate(zip(_key(best), _key(second), strict=True)) if a != b)
    other = second.partition.name
    return (
        f"unlike in {other}, no job preempts yours there",
        f"its limit, {span(best.max_minutes)}, is above that of {other}",
        f"all its nodes have GPUs, unlike those of {other}",
        f"its GPUs have the most memory; see also {names(o.partition.name for o in others)}",
        f"the most GPUs; see also {names(o.partition.name for o in others)}",
        f"the cluster's default partition; {other} is like it",
        f"{other} is like it, but goes before others' jobs",
        f"as good as {names(o.partition.name for o in others)}",
    )[place]


def _nothing(cluster: Cluster, wishes: Wishes) -> str:
    lines = ["no partition takes your jobs:"]
    for partition in cluster.partitions:
        wrong = obstacle(cluster, partition, wishes) or "its jobs may take only a minute or two"
        lines.append(f"  {partition.name}: {wrong}")
    return "\n".join([*lines, "see `sinfo`, `scontrol show partition`; is your account active?"])
