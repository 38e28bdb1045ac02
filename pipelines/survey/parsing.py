"""Texts of Slurm's commands, as values. No command is run here.

Only lines of `key=value` and columns that were asked for by name are read: from 22.05 to 26.05 they
have stayed the same, while what is printed for people, and the JSON, changed from release to
release. A key that a release does not have is read as its default.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from pipelines.slurm.queue import duration
from pipelines.survey.values import (
    Accounting,
    Association,
    Gpus,
    Limits,
    Names,
    Node,
    Partition,
    Qos,
    Settings,
    least,
)

ASSOCIATION_COLUMNS = (
    *("Account", "Partition", "QOS", "DefaultQOS", "MaxWall", "MaxJobs", "MaxSubmit"),
    *("MaxTRES", "GrpTRES"),
)
QOS_COLUMNS = (
    *("Name", "MaxWall", "MaxJobsPerUser", "MaxSubmitJobsPerUser", "MaxTRES", "MaxTRESPerUser"),
    *("Preempt", "PreemptMode"),
)
USER_COLUMNS = ("DefaultAccount",)
_UNUSABLE = frozenset(
    ("DOWN", "DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "ERROR", "FUTURE", "INVAL")
)
_NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE")


def settings(text: str) -> Settings:
    """Of `scontrol show config`."""
    found = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))
    return Settings(
        cluster=found.get("ClusterName", ""),
        version=found.get("SLURM_VERSION", ""),
        preempt_type=_word(found, "PreemptType") or "preempt/none",
        preempt_mode=_word(found, "PreemptMode") or "OFF",
        requeues=found.get("JobRequeue") != "0",
        warns_preempted="preempt_send_user_signal" in found.get("SlurmctldParameters", ""),
        temporary_folder=_word(found, "TmpFS") or "/tmp",
        select_type=found.get("SelectType", "select/cons_tres"),
        has_accounting=found.get("AccountingStorageType", "").endswith("slurmdbd"),
    )


def partitions(text: str) -> tuple[Partition, ...]:
    """Of `scontrol show partition --oneliner`."""
    return tuple(
        _partition(found) for found in map(_pairs, text.splitlines()) if "PartitionName" in found
    )


def _partition(found: Mapping[str, str]) -> Partition:
    return Partition(
        name=found["PartitionName"],
        state=found.get("State", "UP"),
        is_default=found.get("Default") == "YES",
        default_minutes=_minutes(found.get("DefaultTime", "")),
        max_minutes=_minutes(found.get("MaxTime", "")),
        accounts=_names(found, "Accounts"),
        qos=_names(found, "Qos"),
        groups=_names(found, "Groups"),
        own_qos=_word(found, "QoS"),
        preempt_mode=found.get("PreemptMode", "OFF"),
        grace_seconds=int(found.get("GraceTime", 0)),
        tier=int(found.get("PriorityTier", 1)),
        # As earlier releases say it, and later ones.
        whole_nodes="EXCLUSIVE" in found.get("OverSubscribe", "")
        or found.get("Exclusive") in ("NODE", "TOPO"),
        for_root=found.get("RootOnly") == "YES",
        needs_reservation=found.get("ReqResv") == "YES",
        max_cpus_per_node=_number(found.get("MaxCPUsPerNode", "")),
        max_memory_per_node_mb=_number(found.get("MaxMemPerNode", "")),
        max_memory_per_cpu_mb=_number(found.get("MaxMemPerCPU", "")),
    )


def nodes(text: str) -> tuple[Node, ...]:
    """Of `scontrol show node --oneliner`."""
    return tuple(_node(found) for found in map(_pairs, text.splitlines()) if "NodeName" in found)


def _node(found: Mapping[str, str]) -> Node:
    # A letter or two after the state say that the node does not answer, is switched off, and so on.
    states = set(found.get("State", "").rstrip("*~#!%$@^-").split("+"))
    memory = int(found.get("RealMemory", 0)) - int(found.get("MemSpecLimit", 0))
    return Node(
        name=found["NodeName"],
        partitions=_list(found.get("Partitions", "")),
        is_usable=not states & _UNUSABLE,
        cpus=int(found.get("CPUEfctv") or found.get("CPUTot") or 1),
        memory_mb=memory,
        disk_mb=int(found.get("TmpDisk", 0)),
        features=_list(found.get("AvailableFeatures", "")),
        gpus=gpus(found.get("Gres", "")),
    )


def gpus(gres: str) -> tuple[Gpus, ...]:
    """Of a node's `gpu:a100:4(S:0-1),gpu:a100_3g.20gb:2,shard:16`."""
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = (word for word in item.split(":") if word != "no_consume")
        if name != "gpu":
            continue
        number = re.fullmatch(r"(\d+)([KMG]?)", words[-1]) if words else None
        count = int(number[1]) << 10 * " KMG".index(number[2] or " ") if number else 1
        kind = words[0] if len(words) > 1 or (words and not number) else ""
        counts[kind] = counts.get(kind, 0) + count
    return tuple(Gpus(kind, count) for kind, count in counts.items() if count)


def accounting(user: str, associations: str, qos: str) -> Accounting:
    """Of what sacctmgr shows of a user, of the associations and of all QOS, in these columns."""
    return Accounting(
        associations=tuple(map(_association, _rows(associations, ASSOCIATION_COLUMNS))),
        qos=tuple(map(_qos, _rows(qos, QOS_COLUMNS))),
        default_account=next((row["DefaultAccount"] for row in _rows(user, USER_COLUMNS)), ""),
    )


def _association(row: Mapping[str, str]) -> Association:
    return Association(
        account=row["Account"],
        partition=row["Partition"],
        qos=_list(row["QOS"]),
        default_qos=row["DefaultQOS"],
        limits=Limits(
            minutes=_minutes(row["MaxWall"]),
            jobs=least((_number(row["MaxJobs"]), _number(row["MaxSubmit"]))),
            gpus=least((_gpus_of_tres(row["MaxTRES"]), _gpus_of_tres(row["GrpTRES"]))),
        ),
    )


def _qos(row: Mapping[str, str]) -> Qos:
    running, submitted = row["MaxJobsPerUser"], row["MaxSubmitJobsPerUser"]
    return Qos(
        name=row["Name"],
        limits=Limits(
            minutes=_minutes(row["MaxWall"]),
            jobs=least((_number(running), _number(submitted))),
            gpus=least((_gpus_of_tres(row["MaxTRES"]), _gpus_of_tres(row["MaxTRESPerUser"]))),
        ),
        preempts=_list(row["Preempt"]),
        preempt_mode=row["PreemptMode"] or "cluster",
    )


def _gpus_of_tres(text: str) -> int | None:
    """Of `cpu=64,gres/gpu=8`."""
    match = re.search(r"(?:^|,)gres/gpu=(\d+)", text)
    return int(match[1]) if match else None


def _pairs(line: str) -> dict[str, str]:
    """The pairs of a line, each key where it comes first: a reason at its end may hold anything."""
    found: dict[str, str] = {}
    for key, value in re.findall(r"(?:^|(?<=\s))(\w+)=(\S*)", line):
        found.setdefault(key, value)
    return found


def _rows(text: str, columns: Sequence[str]) -> Iterable[dict[str, str]]:
    for line in text.splitlines():
        values = line.split("|")
        if len(values) >= len(columns):
            yield dict(zip(columns, values, strict=False))


def _names(found: Mapping[str, str], what: str) -> Names:
    allowed = found.get(f"Allow{what}", "ALL")
    return Names(None if allowed == "ALL" else _list(allowed), _list(found.get(f"Deny{what}", "")))


def _list(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(text.split(","))


def _word(found: Mapping[str, str], key: str) -> str | None:
    text = found.get(key, "")
    return None if text in _NOTHING else text


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _minutes(text: str) -> int | None:
    seconds = duration(text)
    return None if seconds is None else int(seconds // 60)
