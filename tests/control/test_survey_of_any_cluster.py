"""Whatever a cluster is like, a profile for it loads, and some node could run each of its jobs."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.base.errors import LockstepError
from pipelines.config.profiles import Resources, bytes_of, load_profile
from pipelines.survey.choosing import choose
from pipelines.survey.offers import Wishes
from pipelines.survey.values import (
    ALL,
    Accounting,
    Association,
    Cluster,
    Gpus,
    Limits,
    Names,
    Node,
    Partition,
    Qos,
    Settings,
)
from pipelines.survey.writing import head, profile_text
from stages.contracts.catalog import STAGES

PARTITIONS = ("p0", "p1", "p2")
GPUS = (
    (),
    (Gpus("", 2),),
    (Gpus("a100", 4),),
    (Gpus("h200", 8),),
    (Gpus("t4", 1), Gpus("a100", 1)),
)
FEATURES = ("a100_80g", "ib", "old", "h200")


def a_partition(name: str, dice: Random) -> Partition:
    one = dice.choice
    return Partition(
        name,
        state=one(("UP", "UP", "DOWN")),
        default_minutes=one((None, 1, 60, 600, 5000)),
        max_minutes=one((None, 2, 4, 30, 2880)),
        accounts=one((ALL, Names(("a",)), Names(None, ("b",)))),
        qos=one((ALL, Names(("high",)))),
        own_qos=one((None, "high")),
        preempt_mode=one(("OFF", "REQUEUE", "GANG,SUSPEND")),
        tier=one((1, 2)),
        max_cpus_per_node=one((None, 1, 8)),
        max_memory_per_node_mb=one((None, 4000)),
        max_memory_per_cpu_mb=one((None, 500, 8000)),
    )


def a_node(name: str, dice: Random) -> Node:
    return Node(
        name,
        partitions=tuple(dice.sample(PARTITIONS, dice.randint(1, 3))),
        is_usable=dice.random() < 0.9,
        cpus=dice.choice((1, 2, 8, 96)),
        memory_mb=dice.choice((1, 2000, 64_000, 1_000_000)),
        disk_mb=dice.choice((0, 500, 1_000_000)),
        features=tuple(dice.sample(FEATURES, dice.randint(0, 3))),
        gpus=dice.choice(GPUS),
    )


def an_accounting(dice: Random) -> Accounting | None:
    one = dice.choice
    associations = (
        Association(
            account,
            partition=one(("", "p0")),
            qos=one(((), ("normal",), ("normal", "high"))),
            limits=Limits(one((None, 60, 3)), one((None, 1, 20)), one((None, 0, 1, 8))),
        )
        for account in dice.sample("abc", dice.randint(0, 3))
    )
    qos = (Qos("normal"), Qos("high", Limits(None, one((None, 3)), one((None, 4))), ("normal",)))
    return one((None, Accounting(tuple(associations), qos, one(("", "a", "b")))))


def a_cluster(dice: Random) -> Cluster:
    return Cluster(
        Settings(
            "any",
            preempt_type=dice.choice(("preempt/none", "preempt/partition_prio", "preempt/qos")),
            select_type=dice.choice(("select/cons_tres", "select/linear")),
            requeues=dice.choice((True, False)),
        ),
        tuple(a_partition(name, dice) for name in PARTITIONS),
        tuple(a_node(f"n{number}", dice) for number in range(dice.randint(0, 5))),
        accounting=an_accounting(dice),
    )


def fits(job: Resources, node: Node, partition: Partition) -> bool:
    _, _, kind_and_count = (job.gres or "").partition(":")
    kind, _, count = kind_and_count.rpartition(":")
    gpus = sum(each.count for each in node.gpus if not kind or each.kind == kind)
    memory = min(node.memory_mb, partition.max_memory_per_node_mb or node.memory_mb)
    return (
        (not job.constraint or job.constraint in node.features)
        and max(job.gpus_per_node, int(count or 0)) <= gpus
        and job.cpus_per_task * job.tasks_per_node
        <= min(node.cpus, partition.max_cpus_per_node or node.cpus)
        and bytes_of(job.memory) <= memory << 20
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_a_profile_asks_for_nothing_that_the_cluster_has_not(folder: Path, seed: int) -> None:
    dice = Random(seed)
    cluster = a_cluster(dice)
    wishes = Wishes(
        partition=dice.choice((None, None, "p0")),
        account=dice.choice((None, None, "a")),
        qos=dice.choice((None, None, "high")),
        gpus=dice.choice((None, 0, 1, 4)),
        minutes=dice.choice((None, None, 10)),
    )
    try:
        text = profile_text(choose(cluster, wishes), head(cluster, "mine"))
    except LockstepError:
        return  # nothing for this user, and that was said
    path = folder / "slurm_profiles/mine.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    profile = load_profile(folder, "mine")
    for stage in STAGES:
        job = profile.resources(stage)
        partition = cluster.partition_named(job.partition or "")
        assert partition is not None
        assert partition.state == "UP"
        assert job.time_minutes <= (partition.max_minutes or job.time_minutes)
        assert any(fits(job, node, partition) for node in cluster.nodes_of(partition)), text
