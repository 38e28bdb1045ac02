"""The facts about a stage run, one per line, for every output format.

Each fact is a label and a text. Params at their defaults are counted, not listed, unless requested.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from pipelines.base.console import seconds
from pipelines.identity.environment import INFORMATION_ONLY
from pipelines.lineage.naming import role_of
from pipelines.lineage.stage_run import StageRun, flatten, short_hash
from stages.contracts.params import Params

_LONG = ("system", "libc", "cpu_features", "blas", "matmul_precision", "cpu_capability")
"""Keys of an environment that matter only where they differ."""


@cache
def defaults() -> Mapping[str, Any]:
    """The default of each param, by dotted name."""
    return flatten(Params().model_dump(mode="json", by_alias=True))


def facts(stage_run: StageRun, *, all_params: bool = False) -> list[tuple[str, str]]:
    """Label and text of every fact that is not empty."""
    rows = [
        ("outs", _outs(stage_run)),
        ("params", _params(stage_run, all_params=all_params)),
        ("code", code(stage_run)),
        ("env", environment(stage_run)),
        ("job", job(stage_run)),
        ("mlflow", run(stage_run)),
        ("commits", _commits(stage_run)),
    ]
    return [(label, text) for label, text in rows if text]


def _outs(stage_run: StageRun) -> str:
    named = {path: role_of(stage_run.stage, path, among_inputs=False) for path in stage_run.outs}
    return ", ".join(
        f"{PurePosixPath(name).name} {short_hash(stage_run.outs[path])}"
        for path, name in named.items()
        if name != "metrics"
    )


def _params(stage_run: StageRun, *, all_params: bool) -> str:
    known = defaults()
    shown = {
        key: value
        for key, value in stage_run.params.items()
        if all_params or key not in known or known[key] != value
    }
    text = ", ".join(f"{key} {value_text(value)}" for key, value in shown.items())
    left = len(stage_run.params) - len(shown)
    more = f"{left} at their defaults" if left else ""
    return ", ".join(part for part in (text, more) if part)


def code(stage_run: StageRun) -> str:
    """Commit, uncommitted changes, version."""
    job = stage_run.job
    parts = []
    if job is not None and job.commit:
        changes = f" with uncommitted changes to {', '.join(job.uncommitted)}"
        parts.append(f"commit {job.commit[:7]}{changes if job.uncommitted else ''}")
    elif stage_run.commits:
        parts.append(f"recorded by commit {stage_run.commits[0][:7]}")
    if stage_run.code:
        parts.append(f"{len(stage_run.code)} files")
    if stage_run.code_version:
        parts.append(f"version {short_hash(stage_run.code_version)}")
    return ", ".join(parts)


def environment(stage_run: StageRun) -> str:
    flat = {
        key.removeprefix("packages."): value
        for key, value in stage_run.environment.items()
        if key not in (*INFORMATION_ONLY, *_LONG) and value is not None
    }
    return ", ".join(f"{key} {value_text(value)}" for key, value in flat.items())


def job(stage_run: StageRun) -> str:
    """Executor, number, host, attempts, time."""
    job = stage_run.job
    if job is None:
        return "no record in this clone"
    last = job.attempts[-1] if job.attempts else None
    parts = []
    if last is not None:
        where = f" on {last.host}" if last.host else ""
        parts.append(f"{last.executor or '?'} {last.job or ''}".strip() + where)
        many = len(job.attempts)
        parts.append("1 attempt" if many == 1 else f"{many} attempts")
    if job.started is not None and job.ended is not None:
        parts.append(seconds(job.ended - job.started))
    parts.append(job.entry)
    if len(stage_run.jobs) > 1:
        parts.append(f"computed {len(stage_run.jobs)} times with the same result")
    return ", ".join(parts)


def run(stage_run: StageRun) -> str:
    job = stage_run.job
    if job is None or not job.mlflow_run:
        return ""
    return f"run {job.mlflow_run}" + (f" {job.mlflow_url}" if job.mlflow_url else "")


def _commits(stage_run: StageRun) -> str:
    """Which commits' dvc.lock records it, where the workspace's does not."""
    if stage_run.in_workspace:
        return ""
    if not stage_run.commits:
        return "in no dvc.lock: only the ledger has it"
    if len(stage_run.commits) == 1:
        return f"in dvc.lock of {stage_run.commits[0][:7]}, not of the workspace"
    first, last = stage_run.commits[0][:7], stage_run.commits[-1][:7]
    return f"in dvc.lock of {len(stage_run.commits)} commits from {first} to {last}, not here"


def value_text(value: Any) -> str:
    """A param or a version, in one line."""
    if isinstance(value, str):
        return value if value and "\n" not in value else repr(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
