"""What a profile may hand to sbatch and srun as it is written, and what lockstep sets itself."""

import shlex
from typing import Annotated, Any

from pydantic import AfterValidator


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} must fit on one line of the job script: remove line breaks")
    return text


def _whole_words(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be parsed as a shell command: {error}") from None
    return text


def _none_of_ours(flags: dict[str, Any]) -> dict[str, Any]:
    for flag in flags:
        name = flag.replace("_", "-")
        if name in _FIELDS:
            raise ValueError(f"use the field `{_FIELDS[name]}` instead of `{flag}` in `extra`")
        if name in _OURS:
            raise ValueError(f"`{flag}` is set by lockstep, which finds its jobs by it: remove it")
    return flags


def _flag_of_a_step(flag: str) -> str:
    name = flag.removeprefix("--").partition("=")[0]
    if not flag.startswith("--") or not name:
        raise ValueError(f"`{flag}` must be one long flag of srun, such as --mpi=pmix")
    if name in _OURS_IN_SRUN:
        raise ValueError(f"`--{name}` of srun is set by lockstep: remove it from `srun`")
    return flag


_FIELDS = {
    "account": "account",
    "array": "shards",
    "constraint": "constraint",
    "cpus-per-task": "cpus_per_task",
    "exclude": "exclude",
    "gpus-per-node": "gpus_per_node",
    "gres": "gres",
    "licenses": "licenses",
    "mem": "memory",
    "no-requeue": "requeue",
    "nodes": "nodes",
    "ntasks": "tasks_per_node",
    "ntasks-per-node": "tasks_per_node",
    "partition": "partition",
    "qos": "qos",
    "requeue": "requeue",
    "reservation": "reservation",
    "segment": "segment",
    "signal": "signal_lead_seconds",
    "switches": "switches",
    "time": "time_minutes",
}
"""Flags of sbatch that have their own field."""
_OURS = (
    *("chdir", "comment", "dependency", "error", "input", "job-name", "kill-on-invalid-dep"),
    *("open-mode", "output", "parsable", "test-only", "wait", "wrap"),
)
_OURS_IN_SRUN = (
    *("cpus-per-task", "error", "export", "input", "jobid", "kill-on-bad-exit", "label", "nodes"),
    *("ntasks", "ntasks-per-node", "output", "unbuffered"),
)
Line = Annotated[str, AfterValidator(_one_line)]
Words = Annotated[Line, AfterValidator(_whole_words)]
StepFlag = Annotated[Line, AfterValidator(_flag_of_a_step)]
Flags = Annotated[dict[Line, Line | int | bool], AfterValidator(_none_of_ours)]
