"""What is said about a making, line by line, for every form of output.

Each fact is a word and a text. Params at their defaults are counted, not listed, unless asked for.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from pipelines.base.console import seconds
from pipelines.identity.environment import INFORMATION_ONLY
from pipelines.lineage.making import Making, short_hash
from pipelines.lineage.naming import role_of
from stages.contracts.params import Params

_LONG = ("system", "libc", "cpu_features", "blas", "matmul_precision", "cpu_capability")
"""Keys of an environment that matter where they differ, and tell little by themselves."""


@cache
def defaults() -> Mapping[str, Any]:
    """The default of each param, by dotted name."""
    from pipelines.lineage.making import flatten

    return flatten(Params().model_dump(mode="json", by_alias=True))


def facts(making: Making, *, all_params: bool = False) -> list[tuple[str, str]]:
    """Word and text of all that is worth a line."""
    found = [
        ("outs", _outs(making)),
        ("params", _params(making, all_params=all_params)),
        ("code", code(making)),
        ("env", environment(making)),
        ("job", job(making)),
        ("mlflow", run(making)),
        ("commits", _commits(making)),
    ]
    return [(word, text) for word, text in found if text]


def _outs(making: Making) -> str:
    named = {path: role_of(making.stage, path, among_inputs=False) for path in making.outs}
    return ", ".join(
        f"{PurePosixPath(name).name} {short_hash(making.outs[path])}"
        for path, name in named.items()
        if name != "metrics"
    )


def _params(making: Making, *, all_params: bool) -> str:
    known = defaults()
    shown = {
        key: value
        for key, value in making.params.items()
        if all_params or key not in known or known[key] != value
    }
    text = ", ".join(f"{key} {value_text(value)}" for key, value in shown.items())
    left = len(making.params) - len(shown)
    more = f"{left} at their defaults" if left else ""
    return ", ".join(part for part in (text, more) if part)


def code(making: Making) -> str:
    """Commit, uncommitted changes, version."""
    job = making.job
    parts = []
    if job is not None and job.commit:
        changes = f" with uncommitted changes to {', '.join(job.uncommitted)}"
        parts.append(f"commit {job.commit[:7]}{changes if job.uncommitted else ''}")
    elif making.commits:
        parts.append(f"recorded by commit {making.commits[0][:7]}")
    if making.code:
        parts.append(f"{len(making.code)} files")
    if making.code_version:
        parts.append(f"version {short_hash(making.code_version)}")
    return ", ".join(parts)


def environment(making: Making) -> str:
    flat = {
        key.removeprefix("packages."): value
        for key, value in making.environment.items()
        if key not in (*INFORMATION_ONLY, *_LONG) and value is not None
    }
    return ", ".join(f"{key} {value_text(value)}" for key, value in flat.items())


def job(making: Making) -> str:
    """Executor, number, host, attempts, time."""
    job = making.job
    if job is None:
        return "no record of it in this clone"
    last = job.tries[-1] if job.tries else None
    parts = []
    if last is not None:
        where = f" on {last.host}" if last.host else ""
        parts.append(f"{last.executor or '?'} {last.job or ''}".strip() + where)
        many = len(job.tries)
        parts.append("1 attempt" if many == 1 else f"{many} attempts")
    if job.started is not None and job.ended is not None:
        parts.append(seconds(job.ended - job.started))
    parts.append(job.name)
    if len(making.jobs) > 1:
        parts.append(f"computed {len(making.jobs)} times with the same outcome")
    return ", ".join(parts)


def run(making: Making) -> str:
    job = making.job
    if job is None or not job.run_id:
        return ""
    return f"run {job.run_id}" + (f" {job.run_url}" if job.run_url else "")


def _commits(making: Making) -> str:
    """Where dvc.lock records it, where that is not simply the workspace."""
    if making.in_workspace:
        return ""
    if not making.commits:
        return "in no dvc.lock: only the ledger has it"
    if len(making.commits) == 1:
        return f"in dvc.lock of {making.commits[0][:7]}, not of the workspace"
    first, last = making.commits[0][:7], making.commits[-1][:7]
    return f"in dvc.lock of {len(making.commits)} commits from {first} to {last}, not here"


def value_text(value: Any) -> str:
    """A param or a version, in one line."""
    if isinstance(value, str):
        return value if value and "\n" not in value else repr(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
