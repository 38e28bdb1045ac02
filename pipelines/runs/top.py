"""`lockstep top`: what the running jobs of this clone use on their nodes, as their nodes say it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.slurm.inside import RunningJob, running_jobs, usage_of

AT_ONCE = 8
"""Jobs that are asked at the same time."""
_GIB = 1 << 30
_HEAD = ("stage", "job", "node", "cores", "memory", "GPU", "busy", "GPU memory")


def look(repository: Repository) -> list[dict[str, Any]]:
    """A row for each node of each job, or for a job that does not answer."""
    jobs = running_jobs(repository)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [row for rows in pool.map(_ask, jobs) for row in rows]


def _ask(job: RunningJob) -> list[dict[str, Any]]:
    named = {"stage": job.stage, "job": job.job}
    try:
        return [{**named, **usage} for usage in usage_of(job)]
    except LockstepError as error:
        return [{**named, "host": job.nodes, "problem": str(error)}]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each GPU; for each node where there is none."""
    if not rows:
        return "no job of this clone runs on Slurm"
    lines = [_HEAD, *(line for row in rows for line in _lines(row))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _lines(row: dict[str, Any]) -> list[tuple[str, ...]]:
    who = (row["stage"], row["job"], row["host"])
    if "problem" in row:
        return [(*who, row["problem"], "", "", "", "")]
    used = (f"{row['cores']:.1f}", _gib(row["memory_bytes"]))
    if not row["gpus"]:
        return [(*who, *used, "none", "", "")]
    blank = ("", "", "", "", "")
    return [
        (
            *((*who, *used) if at == 0 else blank),
            f"{gpu['index']} {gpu['name']}",
            "?" if gpu["busy_percent"] is None else f"{gpu['busy_percent']:.0f} %",
            f"{_gib(gpu['memory_bytes'])} of {_gib(gpu['memory_total_bytes'])}",
        )
        for at, gpu in enumerate(row["gpus"])
    ]


def _gib(number: int | None) -> str:
    return "?" if number is None else f"{number / _GIB:.1f} GiB"
