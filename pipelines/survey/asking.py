"""The questions that are put to Slurm about a cluster, as few as there are kinds of answers."""

import getpass
import grp
import os
import shutil
from contextlib import suppress

from pipelines.base.errors import LockstepError
from pipelines.slurm.queue import SlurmSilent, ask
from pipelines.survey import parsing
from pipelines.survey.values import Accounting, Cluster


def look() -> Cluster:
    """The cluster that this machine's Slurm commands speak to."""
    if shutil.which("scontrol") is None:
        raise LockstepError(
            "there is no Slurm here (no `scontrol` on PATH): run this on a login node of the "
            "cluster; by hand, copy slurm_profiles/slurm.yaml and set `partition` and `account`"
        )
    settings = parsing.settings(ask(["scontrol", "show", "config"]))
    return Cluster(
        settings=settings,
        partitions=parsing.partitions(ask(["scontrol", "show", "partition", "--oneliner"])),
        nodes=parsing.nodes(ask(["scontrol", "show", "node", "--oneliner"])),
        groups=_groups(),
        accounting=_accounting(settings.cluster) if settings.has_accounting else None,
    )


def _accounting(cluster: str) -> Accounting | None:
    user = getpass.getuser()
    show = ["sacctmgr", "--noheader", "--parsable2", "show"]
    try:
        return parsing.accounting(
            user=ask([*show, "user", user, f"format={','.join(parsing.USER_COLUMNS)}"]),
            associations=ask(
                [
                    *(*show, "assoc", f"user={user}", f"cluster={cluster}"),
                    f"format={','.join(parsing.ASSOCIATION_COLUMNS)}",
                ]
            ),
            qos=ask([*show, "qos", f"format={','.join(parsing.QOS_COLUMNS)}"]),
        )
    except SlurmSilent:
        return None  # the database is away, or closed to users: the profile says that it is unknown


def _groups() -> tuple[str, ...]:
    names = []
    for number in sorted({os.getgid(), *os.getgroups()}):
        with suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return tuple(names)
