"""Whether the cluster would take the jobs of a profile, as `lockstep doctor` finds out.

sbatch itself is asked (`--test-only` submits nothing): it knows partitions, features, reservations,
memory, and what the user may use. Two things it may let pass, depending on the site: a time limit
that no partition has, with which a job waits for ever, and an account or QOS that nobody knows.
"""

import getpass
import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from pipelines.base.repository import Repository
from pipelines.config.profiles import Resources, load_profile
from pipelines.doctor.result import CheckResult
from pipelines.slurm.queue import duration
from pipelines.slurm.script import Batch
from pipelines.slurm.submit import refusal
from stages.contracts.catalog import STAGES

_ASKED = (
    *("partition", "account", "qos", "constraint", "reservation", "exclude"),
    *("time_minutes", "nodes", "tasks_per_node", "cpus_per_task", "memory"),
    *("gpus_per_node", "gres"),
)


def examine_slurm(repository: Repository, profile: str | None) -> Iterator[CheckResult]:
    """The cluster and, where a profile needs it, whether it would start that profile's jobs."""
    if shutil.which("sbatch") is None:
        detail = "no sbatch here: profiles with `executor: slurm` only render"
        yield CheckResult("slurm", not profile, detail, "go to a login node, or `make slurm-up`")
        return
    rows, problem = _ask("sinfo", "--noheader", "--format", "%P|%l")
    if problem:
        detail = problem if profile else "Slurm does not answer here, and the profile needs none"
        yield CheckResult("slurm", not profile, detail, "see `sinfo`; is SLURM_CONF set?")
        return
    limits = {name: duration(limit) for name, _, limit in (row.partition("|") for row in rows)}
    yield CheckResult("slurm", True, f"partitions {', '.join(name.rstrip('*') for name in limits)}")
    if profile:
        yield from _jobs(repository, profile, limits)


def _jobs(
    repository: Repository, profile: str, limits: Mapping[str, float | None]
) -> Iterator[CheckResult]:
    loaded = load_profile(repository.root, profile)
    alike: dict[tuple[str, str], list[str]] = {}
    for stage in STAGES:
        resources = loaded.resources(stage)
        alike.setdefault((_describe(resources), str(resources.extra)), []).append(stage)
    mine = _associations()
    remedy = f"change slurm_profiles/{profile}.yaml; see `sinfo`, `scontrol show partition`"
    if mine:
        remedy += ", `sacctmgr show assoc user=$USER`"
    for stages in alike.values():
        resources = loaded.resources(stages[0])
        who = ", ".join(stages) if len(alike) > 1 else "all stages"
        problem = _refused(repository, stages[0], resources, limits) or _unknown(resources, mine)
        if problem:
            detail = f"{who}: {problem} ({_describe(resources)})"
            yield CheckResult("slurm jobs", False, detail, remedy)
        else:
            yield CheckResult("slurm jobs", True, f"{who}: Slurm would take them")


def _refused(
    repository: Repository, stage: str, resources: Resources, limits: Mapping[str, float | None]
) -> str | None:
    root = repository.root
    batch = Batch(stage, repository.home / "doctor", resources, "doctor", root, root)
    if said := refusal(batch):
        return said
    default = next((name for name in limits if name.endswith("*")), "").rstrip("*")
    asked = resources.partition or os.environ.get("SBATCH_PARTITION") or default
    minutes = [
        math.inf if limit is None else limit / 60
        for name, limit in limits.items()
        if name.rstrip("*") in asked.split(",")
    ]
    if minutes and resources.time_minutes > max(minutes):
        of = f"the {max(minutes):.0f} that partition {asked} allows"
        return f"`time_minutes` {resources.time_minutes} is more than {of}"
    return None


def _associations() -> dict[str, set[str]]:
    """The accounts and QOS that accounting has for this user; nothing where there is none."""
    if shutil.which("sacctmgr") is None:
        return {}
    words = ("show", "assoc", f"user={getpass.getuser()}", "format=Account,QOS")
    rows, problem = _ask("sacctmgr", "--noheader", "--parsable2", *words)
    if problem or not rows:
        return {}
    pairs = [row.partition("|") for row in rows]
    qos = {name for _, _, names in pairs for name in names.split(",")}
    return {"account": {account for account, _, _ in pairs}, "qos": qos - {""}}


def _unknown(resources: Resources, mine: Mapping[str, set[str]]) -> str | None:
    for key, known in mine.items():
        asked = getattr(resources, key)
        if asked and asked not in known:
            return f"accounting has no `{key}` {asked} for you, but {', '.join(sorted(known))}"
    return None


def _describe(resources: Resources) -> str:
    """What a job asks for, by the profile's keys."""
    asked = {key: getattr(resources, key) for key in _ASKED}
    return ", ".join(f"{key} {value}" for key, value in asked.items() if value)


def _ask(*command: str) -> tuple[list[str], str]:
    """The lines of its answer; or what it complains about."""
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        return [], (done.stderr.strip() or f"{command[0]} failed").splitlines()[-1]
    return done.stdout.splitlines(), ""
