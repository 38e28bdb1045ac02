"""Stage runs from the job ledger: what each entry computed, from what, where.

An entry that is incomplete or corrupted is skipped and named in the notes: lineage only reads and
never repairs. Files that only add detail (launch, worker, tracking) may be missing.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.base.repository import Repository
from pipelines.lineage.stage_run import AttemptRecord, Job, StageRun, flatten

_CHANGED = re.compile(r"^diff --git a/(.+) b/\1$", re.MULTILINE)


def read_ledger(repository: Repository, notes: list[str]) -> list[StageRun]:
    """One stage run for each entry that has a result; what cannot be read is noted."""
    stage_runs = []
    for folder in sorted(repository.jobs.glob("*/[!.]*")):
        if not (folder / "spec.json").is_file():
            if folder.is_dir() and any(folder.iterdir()) and folder.name != "dry-run":
                notes.append(f"{_place(folder)} is skipped: it has no spec.json")
            continue
        try:
            stage_run = _stage_run(folder, partial(_read, folder, notes))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(f"{_place(folder)} is skipped: its files are not valid ({error!r})")
            continue
        if stage_run is not None:
            stage_runs.append(stage_run)
    return stage_runs


def _read(folder: Path, notes: list[str], name: str) -> dict[str, Any]:
    """A JSON file of an entry; one that cannot be read is noted and counts as missing."""
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        notes.append(f"{_place(folder)}/{name} is skipped: not a mapping")
    except FileNotFoundError:
        pass
    except (ValueError, OSError) as error:
        notes.append(f"{_place(folder)}/{name} is skipped: {error}")
    return {}


def _place(folder: Path) -> str:
    return f".lockstep/jobs/{folder.parent.name}/{folder.name}"


def _stage_run(folder: Path, read: Callable[[str], dict[str, Any]]) -> StageRun | None:
    spec, entry, record = read("spec.json"), read("entry.json"), read("record.json")
    if not spec:
        return None
    names = sorted(path.name for path in (folder / "attempts").glob("[0-9]*") if path.is_dir())
    launches = {name: read(f"attempts/{name}/launch.json") for name in names}
    results = {name: read(f"attempts/{name}/result.json") for name in names}
    last = names[-1] if names else ""
    outcome = record or results.get(last, {})
    if not outcome.get("outs"):
        return None
    launch = launches.get(last, {})
    attempts = tuple(
        _attempt(int(name), launches[name], read(f"attempts/{name}/worker.json"), results[name])
        for name in names
    )
    tracking = read("tracking.json")
    job = Job(
        entry=f"{folder.parent.name}/{folder.name}",
        state="published" if record else str(outcome.get("state")),
        commit=entry.get("git_commit") or outcome.get("git_commit"),
        uncommitted=tuple(_CHANGED.findall(launch.get("git_diff") or "")),
        experiment=entry.get("experiment"),
        command=(entry.get("invocation") or {}).get("command"),
        fingerprint=spec.get("fingerprint"),
        environment=outcome.get("environment") or {},
        earlier_environments=tuple(outcome.get("earlier_environments") or ()),
        started=outcome.get("started"),
        ended=outcome.get("ended"),
        attempts=attempts,
        mlflow_run=tracking.get("run_id"),
        mlflow_url=tracking.get("url"),
        folder=folder,
        graph=_graph(launch),
    )
    return stage_run_of(spec, outcome["outs"], job)


def stage_run_of(spec: Mapping[str, Any], outs: Mapping[str, str], job: Job) -> StageRun:
    """A stage run as its job's files describe it, without its code files."""
    return StageRun(
        stage=spec["stage"],
        params=flatten(spec["config"]),
        inputs={item["path"]: item["hash"] for item in spec["inputs"].values()},
        code={},
        outs=dict(outs),
        code_version=spec.get("code"),
        jobs=(job,),
    )


def _attempt(
    number: int, launch: Mapping[str, Any], worker: Mapping[str, Any], result: Mapping[str, Any]
) -> AttemptRecord:
    jobs = launch.get("jobs") or []
    return AttemptRecord(
        number=number,
        executor=launch.get("executor"),
        profile=launch.get("profile"),
        job=str(launch.get("job") or ",".join(map(str, jobs))) or None,
        host=worker.get("host"),
        state=str(result.get("state", "no result")),
    )


def _graph(launch: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    nodes = launch.get("graph") or ()
    return {node["stage"]: {p: h for p, h in node["outs"].items() if h} for node in nodes}
