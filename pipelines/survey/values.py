"""A cluster as its user sees it: partitions, nodes, limits, and who may use them.

None stands for what Slurm does not limit, and for what nobody has told it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one type in a node."""

    kind: str
    """As the site calls it (`a100`, `nvidia_h100_80gb_hbm3`); empty where it only counts them."""
    count: int


@dataclass(frozen=True)
class Node:
    name: str
    partitions: tuple[str, ...]
    is_usable: bool
    """Neither down nor drained; one that is switched off and would be started for a job is."""
    cpus: int
    """That jobs may have."""
    memory_mb: int
    """That jobs may have."""
    disk_mb: int
    """Of the temporary file system, as configured."""
    features: tuple[str, ...] = ()
    gpus: tuple[Gpus, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(each.count for each in self.gpus)


@dataclass(frozen=True)
class Names:
    """Who or what a partition takes: all but some, or only some."""

    allowed: tuple[str, ...] | None = None
    denied: tuple[str, ...] = ()

    def take(self, name: str) -> bool:
        return name not in self.denied and (self.allowed is None or name in self.allowed)


ALL = Names()


@dataclass(frozen=True)
class Partition:
    name: str
    state: str = "UP"
    is_default: bool = False
    default_minutes: int | None = None
    max_minutes: int | None = None
    accounts: Names = ALL
    qos: Names = ALL
    groups: Names = ALL
    own_qos: str | None = None
    """Whose limits count here beside those of the job's QOS."""
    preempt_mode: str = "OFF"
    grace_seconds: int = 0
    tier: int = 1
    """Jobs of a higher one go first and, at some sites, preempt those of a lower one."""
    whole_nodes: bool = False
    for_root: bool = False
    needs_reservation: bool = False
    max_cpus_per_node: int | None = None
    max_memory_per_node_mb: int | None = None
    max_memory_per_cpu_mb: int | None = None


@dataclass(frozen=True)
class Limits:
    """What accounting limits for a QOS, or for a user under an account."""

    minutes: int | None = None
    jobs: int | None = None
    """That run or wait at once."""
    gpus: int | None = None
    """Of all jobs of a user at once, or of one job."""

    def within(self, other: "Limits") -> "Limits":
        """Where both count."""
        return Limits(
            minutes=least((self.minutes, other.minutes)),
            jobs=least((self.jobs, other.jobs)),
            gpus=least((self.gpus, other.gpus)),
        )


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Qos:
    name: str
    limits: Limits = NO_LIMITS
    preempts: tuple[str, ...] = ()
    preempt_mode: str = "cluster"


@dataclass(frozen=True)
class Association:
    """That this user may charge an account, perhaps in one partition only."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: Limits = NO_LIMITS


@dataclass(frozen=True)
class Accounting:
    """What the accounting database has of this user and this cluster."""

    associations: tuple[Association, ...]
    qos: tuple[Qos, ...] = ()
    default_account: str = ""

    def qos_named(self, name: str | None) -> Qos | None:
        return next((each for each in self.qos if each.name == name), None)


@dataclass(frozen=True)
class Settings:
    """What `scontrol show config` says that concerns jobs."""

    cluster: str
    version: str = ""
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"
    requeues: bool = True
    """Whether a job that asks for nothing is requeued after the failure of a node."""
    warns_preempted: bool = False
    """Whether preemption sends the signal that the job has asked for."""
    temporary_folder: str = "/tmp"
    select_type: str = "select/cons_tres"
    has_accounting: bool = False


@dataclass(frozen=True)
class Cluster:
    settings: Settings
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    groups: tuple[str, ...] = ()
    """Of the user."""
    accounting: Accounting | None = None
    """None: there is none, or it does not answer."""

    def nodes_of(self, partition: Partition) -> list[Node]:
        """Those that could run a job now or later."""
        return [node for node in self.nodes if node.is_usable and partition.name in node.partitions]

    def partition_named(self, name: str) -> Partition | None:
        return next((each for each in self.partitions if each.name == name), None)


def least(numbers: Iterable[int | None]) -> int | None:
    """The least of the limits, where there is any."""
    return min((number for number in numbers if number is not None), default=None)
