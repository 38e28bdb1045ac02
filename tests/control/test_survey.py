"""Reading a cluster and choosing a profile for it, on what Slurm answered and on small clusters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.errors import LockstepError
from pipelines.config.profiles import Profile, load_profile
from pipelines.survey import parsing
from pipelines.survey.choosing import choose
from pipelines.survey.gpus import memory_of
from pipelines.survey.offers import Wishes
from pipelines.survey.values import (
    Accounting,
    Association,
    Cluster,
    Gpus,
    Limits,
    Names,
    Node,
    Partition,
    Settings,
)
from pipelines.survey.writing import head, profile_text, write
from stages.contracts.catalog import STAGES
from tests.control.recorded_clusters import RELEASES, recorded


def orion(release: str, user: str = "ada") -> Cluster:
    said = recorded(release)
    accounting = parsing.accounting(said[f"user {user}"], said[f"assoc {user}"], said["qos"])
    return Cluster(
        settings=parsing.settings(said["config"]),
        partitions=parsing.partitions(said["partitions"]),
        nodes=parsing.nodes(said["nodes"]),
        accounting=replace(accounting, qos=tuple(sorted(accounting.qos, key=lambda q: q.name))),
    )


def made(folder: Path, cluster: Cluster, **wishes: Any) -> tuple[Profile, str]:
    """The profile as it is read from the file, and the file."""
    text = profile_text(choose(cluster, Wishes(**wishes)), head(cluster, "mine"))
    write(folder / "slurm_profiles/mine.yaml", text)
    assert max(map(len, text.splitlines())) <= 100
    return load_profile(folder, "mine"), text


def prose(text: str) -> str:
    """Comments as they read, however their lines are broken."""
    return " ".join(text.replace("#", " ").split())


def small(*, count: int = 2, **node: Any) -> Cluster:
    """A cluster of one partition whose nodes have four A100, but for what is said otherwise."""
    usual = {"cpus": 32, "memory_mb": 256_000, "disk_mb": 0, "gpus": (Gpus("a100", 4),)}
    nodes = (
        Node(f"n{number}", ("main",), is_usable=True, **{**usual, **node})
        for number in range(count)
    )
    return Cluster(Settings("small"), (Partition("main", is_default=True),), tuple(nodes))


def joined(*clusters: Cluster, **partitions: dict[str, Any]) -> Cluster:
    """Their nodes together, each cluster's in the partition that stands at its place."""
    nodes: list[Node] = []
    for cluster, name in zip(clusters, partitions, strict=True):
        nodes += [
            replace(node, name=f"{name}-{node.name}", partitions=(name,)) for node in cluster.nodes
        ]
    kept = tuple(Partition(name, **values) for name, values in partitions.items())
    return Cluster(clusters[0].settings, kept, tuple(nodes))


def test_the_releases_of_slurm_are_read_alike() -> None:
    older, newer = (orion(release) for release in RELEASES)
    assert older.settings.version != newer.settings.version
    assert replace(older, settings=replace(older.settings, version="26.05.5")) == newer


@pytest.mark.parametrize("release", RELEASES)
def test_limits_rights_and_gpus_are_found(release: str) -> None:
    cluster = orion(release)
    [admin, accel] = [cluster.partition_named(name) for name in ("admin", "accel")]
    assert admin is not None
    assert accel is not None
    assert admin.whole_nodes
    assert admin.accounts == Names(("ops",))
    assert admin.max_minutes is None
    assert accel.qos == Names(("normal", "long"))
    assert (accel.default_minutes, accel.max_minutes, accel.max_memory_per_cpu_mb) == (
        *(240, 2880),
        20_000,
    )
    gpu01 = next(node for node in cluster.nodes if node.name == "gpu01")
    assert (gpu01.gpus, gpu01.memory_mb) == ((Gpus("a100", 4),), 500_000)
    assert gpu01.partitions == ("accel", "scavenge", "admin")
    assert cluster.accounting is not None
    assert cluster.accounting.associations[0].limits == Limits(jobs=16)
    long = cluster.accounting.qos_named("long")
    assert long is not None
    assert long.limits == Limits(minutes=2880, jobs=3, gpus=4)
    assert not cluster.settings.requeues


@pytest.mark.parametrize("release", RELEASES)
def test_account_qos_and_the_limits_of_both_are_heeded(release: str, tmp_path: Path) -> None:
    ada, text = made(tmp_path, orion(release))
    assert (ada.defaults.account, ada.defaults.qos, ada.parallel) == ("llm", "normal", 8)
    assert (ada.defaults.partition, ada.defaults.constraint) == ("accel", "h100")
    assert ada.defaults.memory == "234G"  # 12 cores with the 20000M each that accel allows
    assert "your default account; you also have physics" in prose(text)
    assert "JobRequeue=0" in prose(text)
    assert not ada.defaults.requeue
    assert "at most 24 h" in prose(text)  # by the QOS, of the partition's two days

    long, text = made(tmp_path, orion(release), qos="long")
    assert long.parallel == 3
    assert "at most 2 days" in prose(text)
    with pytest.raises(LockstepError, match=r"--gpus 5: accounting allows you 4 at once"):
        made(tmp_path, orion(release), qos="long", gpus=5)

    bob, text = made(tmp_path, orion(release, "bob"), partition="scavenge")
    assert (bob.defaults.account, bob.defaults.qos) == ("physics", "scavenger")
    assert "Preemption by QOS normal cancels a job" in prose(text)
    # The partition of processors does not take that QOS for granted: the usual one is named there.
    assert bob.resources("prepare").qos == "normal"


NODE = "NodeName=n1 CPUTot=64 CPUEfctv=60 RealMemory=1000 MemSpecLimit=100 Partitions=a,b"


@pytest.mark.parametrize(
    ("state", "is_usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("ALLOCATED~", True),
        ("IDLE+DRAIN", False),
        ("DOWN*", False),
        ("DOWN+CLOUD+NOT_RESPONDING", False),
    ],
)
def test_nodes_that_are_down_or_drained_do_not_count(state: str, is_usable: bool) -> None:
    line = f"{NODE} State={state} Gres=(null) Reason=broken Gres=gpu:9 State=IDLE [root@2026]"
    [node] = parsing.nodes(line)
    assert node.is_usable is is_usable
    assert (node.cpus, node.memory_mb, node.gpus) == (60, 900, ())


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:2", (Gpus("", 2),)),
        ("gpu:a100:8(S:0-1)", (Gpus("a100", 8),)),
        (
            "gpu:a100:4(S:0,2),gpu:a100_3g.20gb:2,shard:16",
            (Gpus("a100", 4), Gpus("a100_3g.20gb", 2)),
        ),
        ("gpu:tesla:no_consume:4,mps:400", (Gpus("tesla", 4),)),
        ("craynetwork:4,gpu", (Gpus("", 1),)),
    ],
)
def test_gpus_are_read_from_gres(gres: str, gpus: tuple[Gpus, ...]) -> None:
    assert parsing.gpus(gres) == gpus


@pytest.mark.parametrize(
    ("kind", "features", "gib", "sizes"),
    [
        ("nvidia_h100_80gb_hbm3", (), 79, ()),
        ("h200", (), 139, (139,)),
        ("nvidia_a100-sxm4-40gb", (), 39, ()),
        ("a100_3g.20gb", (), 19, ()),
        ("a100", (), None, (39, 79)),
        ("a100", ("a100_80g", "ib"), 79, (39, 79)),
        ("a100", ("mem80gb", "gpu40gb"), 39, (39, 79)),
        ("tesla_v100", ("v100-32g",), 31, (15, 31)),
        ("rtx_a6000", (), 47, (47,)),
        ("gpu_l40s", (), 44, (44,)),
        ("potato", (), None, ()),
        ("", (), None, ()),
    ],
)
def test_memory_is_known_by_name_or_not_at_all(
    kind: str, features: tuple[str, ...], gib: int | None, sizes: tuple[int, ...]
) -> None:
    found = memory_of(kind, features)
    assert (found.gib, found.sizes) == (gib, sizes)


def test_a_stage_has_the_share_of_a_node_that_goes_with_its_gpu(tmp_path: Path) -> None:
    profile, text = made(tmp_path, small())
    one = profile.resources("sft")
    assert (one.gpus_per_node, one.cpus_per_task, one.memory) == (1, 8, "62G")
    assert one.gpu_memory is None
    assert "# gpu_memory: 39G  # a100 has 39G or 79G" in text
    # The poorest of the nodes decides.
    poor = small(cpus=16, gpus=(Gpus("a100", 2),), count=1)
    mixed = replace(small(), nodes=(*small().nodes, replace(poor.nodes[0], memory_mb=64_000)))
    assert made(tmp_path, mixed)[0].defaults.memory == "31G"
    # Unless it has too few GPUs for what was asked.
    four = made(tmp_path, mixed, gpus=4)[0].resources("sft")
    assert (four.gpus_per_node, four.tasks_per_node, four.memory) == (4, 4, "248G")


def test_the_better_offer_is_chosen_and_says_why(tmp_path: Path) -> None:
    t4, h200 = small(gpus=(Gpus("t4", 4),), count=9), small(gpus=(Gpus("h200", 8),))
    profile, text = made(tmp_path, joined(t4, h200, many={}, few={}))
    assert profile.defaults.partition == "few"
    assert "its GPUs have the most memory; see also many" in prose(text)

    alike = joined(small(count=3), small(), large={}, little={})
    assert made(tmp_path, alike)[0].defaults.partition == "large"

    short = joined(small(count=3), small(), debug={"max_minutes": 30}, main={})
    profile, text = made(tmp_path, short)
    assert profile.defaults.partition == "main"
    assert "its limit, none, is above that of debug" in prose(text)
    # By hand the other one, with times that it allows.
    assert made(tmp_path, short, partition="debug")[0].defaults.time_minutes == 30

    processors = small(gpus=(), cpus=128, count=4)
    profile, _ = made(tmp_path, joined(processors, small(), cpu={"is_default": True}, gpu={}))
    assert profile.defaults.partition == "gpu"
    assert profile.resources("prepare").partition == "cpu"


def test_a_higher_tier_on_the_same_nodes_preempts(tmp_path: Path) -> None:
    plain = small()
    shared = tuple(replace(node, partitions=("spot", "main")) for node in plain.nodes)
    spot = Partition("spot", preempt_mode="CANCEL", grace_seconds=60)
    main = Partition("main", preempt_mode="OFF", tier=10)
    settings = Settings("small", preempt_type="preempt/partition_prio", preempt_mode="REQUEUE")
    cluster = Cluster(settings, (spot, main), shared)
    profile, text = made(tmp_path, cluster)
    assert profile.defaults.partition == "main"
    assert "no job preempts yours in main" in prose(text)
    preempted, text = made(tmp_path, cluster, partition="spot")
    assert preempted.defaults.requeues > profile.defaults.requeues
    assert "Preemption by partition main cancels a job" in prose(text)
    assert "A job has 60 s to end, but no warning" in prose(text)
    warned = replace(cluster, settings=replace(settings, warns_preempted=True))
    text = made(tmp_path, warned, partition="spot")[1]
    assert "A job is warned 60 s before" in prose(text)


def test_time_limits_are_those_of_the_site(tmp_path: Path) -> None:
    def of(**limits: Any) -> tuple[int, str]:
        cluster = replace(small(), partitions=(Partition("main", **limits),))
        profile, text = made(tmp_path, cluster)
        for stage in STAGES:
            resources = profile.resources(stage)
            assert resources.time_minutes <= limits.get("max_minutes", 10**6)
            assert 60 * resources.time_minutes > resources.signal_lead_seconds + 60
        return profile.defaults.time_minutes, text

    assert of()[0] == 240
    assert of(max_minutes=2880, default_minutes=720)[0] == 720
    assert of(max_minutes=2880, default_minutes=1)[0] == 240
    assert of(max_minutes=2880, default_minutes=2880)[0] == 240
    minutes, text = of(max_minutes=4)
    assert minutes == 4
    assert "the time limit of partition main" in prose(text)
    with pytest.raises(LockstepError, match="its jobs may take only a minute or two"):
        of(max_minutes=2)


def test_gpus_of_a_type_are_asked_for_as_the_site_lets_them(tmp_path: Path) -> None:
    both = replace(
        small(), nodes=(*small().nodes, replace(small().nodes[0], name="x", gpus=(Gpus("t4", 8),)))
    )
    profile, text = made(tmp_path, both)
    assert (profile.defaults.gres, profile.defaults.gpus_per_node) == ("gpu:a100:1", 0)
    assert profile.resources("report").gres is None
    assert "the partition also has t4" in prose(text)
    # Only counted, and told from others by a feature.
    named = [replace(n, gpus=(Gpus("", 4),), features=("gpu_h200", "ib")) for n in small().nodes]
    other = replace(named[0], name="x", features=("t4", "ib"))
    profile, _ = made(tmp_path, replace(both, nodes=(*named, other)))
    assert (profile.defaults.constraint, profile.defaults.gpu_memory) == ("gpu_h200", "139G")
    assert (profile.defaults.gpus_per_node, profile.resources("prepare").constraint) == (1, None)
    # An older way of counting.
    linear = replace(small(), settings=Settings("small", select_type="select/linear"))
    profile, text = made(tmp_path, linear)
    assert (profile.defaults.gres, profile.defaults.gpus_per_node) == ("gpu:a100:1", 0)
    assert "linear knows no --gpus-per-node" in prose(text)


def test_what_slurm_does_not_know_is_left_to_the_user(tmp_path: Path) -> None:
    profile, text = made(tmp_path, small(memory_mb=1))
    assert profile.defaults.memory is None
    assert "# memory: 64G  # Slurm is not told here how much memory the nodes have" in text
    assert "# account: my-team  # this cluster has no accounting" in text
    profile, text = made(tmp_path, small(gpus=()))
    assert {profile.resources(stage).device for stage in STAGES} == {"cpu"}
    assert "counts no GPUs" in prose(text)


def test_where_nothing_takes_a_job_every_partition_says_why() -> None:
    mine = Accounting((Association("llm", qos=("normal",)),), default_account="llm")
    partitions = (
        Partition("asleep", state="DOWN"),
        Partition("theirs", accounts=Names(("physics",))),
        Partition("mine", accounts=Names(denied=("llm",))),
        Partition("booked", needs_reservation=True),
        Partition("club", groups=Names(("chess",))),
        Partition("empty"),
    )
    names = tuple(each.name for each in partitions if each.name != "empty")
    nodes = tuple(replace(node, partitions=names) for node in small().nodes)
    cluster = Cluster(Settings("x"), partitions, nodes, groups=("go",), accounting=mine)
    with pytest.raises(LockstepError) as refused:
        choose(cluster, Wishes())
    lines = [line.strip() for line in str(refused.value).splitlines()]
    assert lines[1:-1] == [
        "asleep: it is DOWN",
        "theirs: not for your accounts and QOS",
        "mine: not for your accounts and QOS",
        "booked: it takes only jobs with a reservation",
        "club: only for the groups chess",
        "empty: none of its nodes is up",
    ]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"partition": "mian"}, "--partition mian: the cluster has no such partition, but main"),
        ({"gpus": 5}, "--gpus 5: a node in partition main has at most 4"),
        ({"minutes": 61}, "--time 61: jobs in partition main take at most 60"),
        ({"account": "nope"}, "--account nope: accounting has for you llm"),
        ({"qos": "high"}, "--qos high: accounting has for you normal"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(wishes: dict[str, Any], said: str) -> None:
    mine = Accounting((Association("llm", qos=("normal",)),), default_account="llm")
    limited = (Partition("main", max_minutes=60),)
    with pytest.raises(LockstepError) as refused:
        choose(replace(small(), partitions=limited, accounting=mine), Wishes(**wishes))
    assert said in str(refused.value)


def test_names_that_yaml_would_misread_are_quoted(tmp_path: Path) -> None:
    mine = Accounting((Association("0123", qos=("on",), default_qos="on"),), default_account="0123")
    nodes = tuple(replace(node, partitions=("12e3",)) for node in small().nodes)
    cluster = Cluster(Settings("x"), (Partition("12e3"),), nodes, accounting=mine)
    profile, _ = made(tmp_path, cluster)
    found = profile.defaults
    assert (found.partition, found.account, found.qos) == ("12e3", "0123", "on")
