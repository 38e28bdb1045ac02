"""The batch script of a stage, written by submitit, and what is put around the stage in it.

The script is complete in itself: it sets the code, the threads and the worker's command, so that it
does the same when somebody submits it by hand. After the worker it looks for a mark that the worker
leaves when Slurm wants the job to end before the stage is done; then it puts itself back into the
queue, where all that waits for the job goes on waiting for it.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.profiles import Resources
from pipelines.ledger.entry import FAILURE_PREFIX

COMMENT_PREFIX = "lockstep:"
NAME_PREFIX = "lockstep-"
REQUEUE_MARK = "requeue."
"""A file of the attempt; the job's number follows, `7` or `7_0`, and which start of it left it.

It holds what the job must have for --exclude from then on, if its nodes were found to be bad.
"""
BAD_NODE_STATUS = 75
"""The exit status of a process whose node is bad, or that of another rank."""

REQUEUE_AGAIN_S = 5
"""Between two tries to put a job back into the queue."""
LINK_OVER, LINK_ELSEWHERE = 3, 4
"""Exit statuses that tell a link not to work: its stage is given up, or another job does it."""


@dataclass(frozen=True)
class Batch:
    """One call of sbatch."""

    stage: str
    folder: Path
    """Where logs go, and what the worker is told."""
    resources: Resources
    token: str
    """Names the submission in Slurm's own list, so that it is found again after any death."""
    code: Path
    root: Path
    """The folder that the job starts in."""
    shards: Sequence[int] | None = None
    """Which shards, as tasks of an array; None is one job."""
    first_shard: int = 0
    """The shard of array index 0: Slurm limits how large an index may be."""
    parallelism: int = 1
    behind: Sequence[str] = ()
    """Jobs that must end, well or not, before this one starts."""
    succeeds: str | None = None
    """The job that must end badly before this one starts; where it ends well, this one goes."""
    chained: bool = False
    """Whether it is a link of a chain, which sees to its successor and to those that wait."""
    module: str = "pipelines.worker.worker"

    @property
    def comment(self) -> str:
        return f"{COMMENT_PREFIX}{self.token}"

    @property
    def name(self) -> str:
        return f"{NAME_PREFIX}{self.stage}"


def batch_script(batch: Batch) -> str:
    """The script, word for word as it is submitted. Needs no Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    return str(
        _make_sbatch_string(command=command_of(batch), folder=batch.folder, **parameters_of(batch))
    )


def command_of(batch: Batch) -> str:
    """What srun starts, once for each process of the job."""
    python = batch.resources.python or sys.executable
    words = [*shlex.split(batch.resources.container or ""), python, "-u", "-m", batch.module]
    if batch.first_shard:
        words += ["--first-shard", str(batch.first_shard)]
    return shlex.join([*words, str(batch.folder)])


def parameters_of(batch: Batch) -> dict[str, Any]:
    """What submitit makes #SBATCH lines and the rest of the script of."""
    resources = batch.resources
    may_requeue = resources.requeue and resources.requeues
    extra: dict[str, Any] = {"requeue" if may_requeue else "no-requeue": True}
    extra["chdir"] = str(batch.root)
    for name in ("reservation", "licenses", "switches", "segment"):
        if (value := getattr(resources, name)) is not None:
            extra[name] = value
    if batch.shards is not None:
        indices = [shard - batch.first_shard for shard in batch.shards]
        extra["array"] = f"{_ranges(indices)}%{min(batch.parallelism, len(indices))}"
    waits = {"afternotok": [batch.succeeds] if batch.succeeds else [], "afterany": batch.behind}
    if kinds := [f"{kind}:{':'.join(jobs)}" for kind, jobs in waits.items() if jobs]:
        extra["dependency"] = ",".join(kinds)
        # Otherwise the successor of a job that ended well stays in the queue for ever.
        extra["kill-on-invalid-dep"] = "yes"
    extra |= _logs(batch, "0")
    return {
        "job_name": batch.name,
        "comment": batch.comment,
        "time": resources.time_minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "gpus_per_node": resources.gpus_per_node or None,
        "mem": resources.memory,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "exclude": resources.exclude,
        "gres": resources.gres,
        "signal_delay_s": resources.signal_lead_seconds,
        "wckey": None,
        # Names the log files after the array's tasks; which tasks there are is said above.
        "map_count": None if batch.shards is None else 1,
        "setup": _before(batch),
        "teardown": _after(batch),
        "additional_parameters": {**extra, **resources.extra},
        "srun_args": [
            # srun does not inherit --cpus-per-task from sbatch in every release.
            f"--cpus-per-task={resources.cpus_per_task}",
            "--kill-on-bad-exit=1",
            # What the script has set reaches the worker, whatever sbatch was told to hand on.
            "--export=ALL",
            *(f"--{name}={pattern}" for name, pattern in _logs(batch, "%t").items()),
            *resources.srun,
        ],
    }


def _logs(batch: Batch, rank: str) -> dict[str, str]:
    """Where a rank's logs go, for a folder with a `%` in its path, of which submitit knows nothing.

    Slurm takes `%j` and the like in the name of a log for the job's number; `%%` is a plain `%`.
    """
    folder = str(batch.folder)
    if "%" not in folder:
        return {}
    job = "%j" if batch.shards is None else "%A_%a"
    name = f"{folder.replace('%', '%%')}/{job}_{rank}_log"
    return {"output": f"{name}.out", "error": f"{name}.err"}


def _before(batch: Batch) -> list[str]:
    threads = str(batch.resources.cpus_per_task)
    variables = {
        # The job imports this very copy of the code, whatever lies in the folder it starts in.
        "PYTHONPATH": str(batch.code),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    return [
        *(_begin_link(batch) if batch.chained else ()),
        # A failing line must end the job instead of running the stage without it.
        "set -e",
        *batch.resources.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "set +e",
        # The worker answers signals; this shell must live to do what comes after it.
        "trap : TERM USR2",
    ]


def _after(batch: Batch) -> list[str]:
    restart = "${SLURM_RESTART_COUNT:-0}"
    mark = f"{shlex.quote(str(batch.folder))}/{REQUEUE_MARK}$job.{restart}"
    return [
        "status=$?",
        # SLURM_JOB_ID alone would stand for the whole array in one of its tasks.
        "job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}",
        f"if [ -e {mark} ]; then",
        f"  exclude=$(cat {mark})",
        f"  rm -f {mark}",
        *(_spare_the_others() if batch.shards is not None else ()),
        *(_requeue() if batch.resources.requeue else ()),
        *(['  [ -z "$exclude" ] || ' + _of_link(batch, "end")] if batch.chained else []),
        # Ended badly: a driver goes on in a new job, or the successor does.
        "  exit 1",
        "fi",
        *(_end_the_others(batch) if batch.shards is not None else ()),
        *(_end_link(batch) if batch.chained else ()),
        "exit $status",
    ]


def _requeue() -> list[str]:
    return [
        # The controller may be away for a moment: ask again before the job is given up.
        "  for try in 1 2 3 4 5; do",
        '    state=$(squeue -h -j "$job" -o %T) && break',
        f"    sleep {REQUEUE_AGAIN_S}",
        "  done",
        # A job that was cancelled is no longer RUNNING, and must not come back.
        '  if [ "$state" = RUNNING ]; then',
        "    for try in 1 2 3 4 5; do",
        '      if answer=$(scontrol requeue "$job" 2>&1); then',
        # By now Slurm ends this script, by a SIGTERM that must not come between; and as long as it
        # has not ended, the job is not started again.
        '        [ -z "$exclude" ] ||',
        '          (trap \'\' TERM; scontrol update JobId="$job" ExcNodeList="$exclude")',
        "        sleep 120",
        "        break",
        "      fi",
        '      echo "$answer" >&2',
        # A site that forbids it does not change its mind.
        '      case "$answer" in *disabled*) break ;; esac',
        f"      sleep {REQUEUE_AGAIN_S}",
        "    done",
        "  fi",
    ]


def _spare_the_others() -> list[str]:
    """A bad node is free again at once: it would get one waiting task of the array after another.

    Those that run cannot be changed, which Slurm says, and which does not matter.
    """
    return [
        '  [ -z "$exclude" ] ||',
        '    scontrol update JobId="$SLURM_ARRAY_JOB_ID" ExcNodeList="$exclude"',
    ]


def _begin_link(batch: Batch) -> list[str]:
    """Before `setup`: what is submitted here gets the environment that this job was given."""
    return [
        _of_link(batch, "begin"),
        "case $? in",
        "  0) ;;",
        f"  {LINK_OVER}) exit 1 ;;",
        f"  {LINK_ELSEWHERE}) exit 0 ;;",
        # Killed by a signal: Slurm ends the job.
        "  12[89]|1[3-9][0-9]) exit 1 ;;",
        '  *) echo "warning: no job goes on with this one if Slurm ends it early" >&2 ;;',
        "esac",
    ]


def _end_link(batch: Batch) -> list[str]:
    failed = f"{shlex.quote(str(batch.folder))}/tasks/{FAILURE_PREFIX}*"
    return [
        f'if [ "$status" != 0 ] && ls {failed} >/dev/null 2>&1; then',
        f"  {_of_link(batch, 'end')}",
        "fi",
    ]


def _of_link(batch: Batch, what: str) -> str:
    """With the Python that submits, which has submitit, and outside any container."""
    variables = f"PYTHONPATH={shlex.quote(str(batch.code))} PYTHONSAFEPATH=1"
    words = [sys.executable, "-m", "pipelines.slurm.successor", what, str(batch.folder)]
    return f"{variables} {shlex.join(words)}"


def _end_the_others(batch: Batch) -> list[str]:
    """Once a shard has failed, no other need begin, whether or not somebody waits for the stage."""
    failed = f"{shlex.quote(str(batch.folder))}/tasks/{FAILURE_PREFIX}*"
    return [
        f'if [ "$status" != 0 ] && ls {failed} >/dev/null 2>&1; then',
        '  echo "a shard has failed: ending the others" >&2',
        "  squeue -h --array --user=$(id -u) -o '%i %k' | while read -r other comment; do",
        f'    [ "$comment" != {batch.comment} ] || [ "$other" = "$job" ] || echo "$other"',
        "  done | xargs -r scancel",
        "fi",
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 as Slurm writes it: 0-2,5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
