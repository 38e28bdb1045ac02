"""What Slurm knows about jobs: squeue first, scontrol for one it left out, sacct for the old ones.

squeue tells the truth about a job that was requeued, where accounting calls it failed; and it needs
no accounting database. slurmctld forgets an ended job after a few minutes (MinJobAge).
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from pipelines.base.errors import LockstepError
from pipelines.base.owners import user_name
from pipelines.ledger.scheduler_view import SlurmJob

TIMEOUT_S = 30.0
DEFAULT_MAX_ARRAY_SIZE = 1001
_FIELDS = ("%i", "%T", "%r", "%N", "%M", "%j", "%k")
"""A comment may hold anything, so it comes last."""


class SlurmSilent(LockstepError):
    """slurmctld does not answer: nothing is known, and nothing has changed."""


def my_jobs() -> list[SlurmJob]:
    """Every job of this user that slurmctld has in memory, the ended ones among them."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--user", str(os.getuid())]
    rows = ask([*command, "--format", "|".join(_FIELDS)]).splitlines()
    return [_from_squeue(row.split("|", len(_FIELDS) - 1)) for row in rows if row.count("|") > 5]


def _from_squeue(values: Sequence[str]) -> SlurmJob:
    identity, state, reason, nodes, used, name, comment = (value.strip() for value in values)
    return SlurmJob(
        id=identity,
        state=state,
        reason="" if reason == "None" else reason,
        nodes=nodes,
        name=name,
        comment=comment,
        used=duration(used),
    )


def duration(text: str) -> float | None:
    """Seconds of `1-02:03:04` or `2:03`; None of what is no duration, such as `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + rest


def details(job: str) -> SlurmJob | None:
    """What scontrol says about one job; None where it does not know it."""
    try:
        text = ask(["scontrol", "show", "job", "--oneliner", job])
    except LookupError:
        return None
    values = dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0])) if text.strip() else {}
    if "JobState" not in values:
        return None
    reason, nodes = values.get("Reason", ""), values.get("NodeList", "")
    return SlurmJob(
        id=job,
        state=values["JobState"],
        reason="" if reason == "None" else reason,
        nodes="" if nodes == "(null)" else nodes,
        name=values.get("JobName", ""),
        comment=values.get("Comment", ""),
        exit=values.get("ExitCode", ""),
        used=duration(values.get("RunTime", "")),
    )


def accounted(jobs: Iterable[str]) -> dict[str, SlurmJob]:
    """What accounting says about ended jobs; nothing where there is no accounting."""
    wanted = sorted({job.partition("_")[0] for job in jobs})
    if not wanted:
        return {}
    columns = "JobID,State,Reason,NodeList,ExitCode,JobName"
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format", columns]
    try:
        rows = ask([*command, "--jobs", ",".join(wanted)]).splitlines()
    except (SlurmSilent, LookupError):
        return {}
    ended = {}
    for identity, state, reason, nodes, exit_code, name in (r.split("|") for r in rows):
        # A job that a crash of slurmctld lost is shown as running for ever, so only an end is
        # believed.
        word, _, by = state.partition(" by ")  # `CANCELLED by 1000`
        who = by and user_name(by)
        job = SlurmJob(identity, word, reason, nodes, name=name, exit=exit_code, by=who)
        if job.ended:
            ended[identity] = job
    return ended


def cancel_jobs(jobs: Sequence[str], are_ours: Callable[[SlurmJob], bool]) -> None:
    """Ask Slurm to end these jobs, as far as it has them and they are ours."""
    if not jobs:
        return
    ours = {job.number for job in my_jobs() if not job.ended and are_ours(job)}
    if wanted := [job for job in jobs if job.partition("_")[0] in ours]:
        with suppress(LookupError):  # it has just ended
            ask(["scancel", "--quiet", *wanted])


def number_of(job: str) -> str:
    """The number that a job has of its own: of `7_0`, a task of an array, it is not 7."""
    try:
        return ask(["squeue", "--noheader", "--jobs", job, "--format", "%A"]).strip()
    except LookupError:
        raise LockstepError(f"Slurm does not know job {job} any more") from None


def max_array_size() -> int:
    """One more than the largest index of an array task."""
    try:
        match = re.search(r"MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]))
    except SlurmSilent:
        match = None
    return int(match[1]) if match else DEFAULT_MAX_ARRAY_SIZE


def ask(command: list[str], **variables: str) -> str:
    """Run one of Slurm's commands. LookupError: it does not know the job."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **variables},
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{command[0]} gave no answer in {TIMEOUT_S:.0f} s") from None
    except FileNotFoundError:
        raise SlurmSilent(f"there is no {command[0]} on this machine") from None
    if done.returncode == 0:
        return done.stdout
    problem = done.stderr.strip() or f"exit status {done.returncode}"
    if "nvalid job id" in problem:
        raise LookupError(problem)
    raise SlurmSilent(f"{command[0]}: {problem}")
