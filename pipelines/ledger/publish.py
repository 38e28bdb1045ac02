"""From a finished job into the workspace, and out of the ledger once DVC has recorded it.

The workspace gets a second name (a hard link; on another disk a copy) for what lies in the entry's
`out`, put in place by a rename. The entry keeps its own until dvc.lock names the same hashes. So a
death at any moment, even between the stage's end and DVC's bookkeeping, costs no computation.

The job has hashed every file: whoever asks for the hash of a second name need not read it again. Of
a copy nobody knows what it holds before it is read.
"""

import errno
import glob
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.repository import Repository
from pipelines.dvc_repo import handover
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.identity.hashing import HashCache
from pipelines.ledger import files, out_hashes
from pipelines.ledger.entry import METRICS_OUT, Entry, Ledger
from pipelines.ledger.environments import earlier_environments
from pipelines.ledger.record import Record
from pipelines.ledger.reports import Result
from pipelines.ledger.state import State
from stages.signature import Known, signature_of

_BESIDE = ".publishing"
"""In the name of what is written beside an output that lies on another disk than the ledger."""


def publish(root: Path, entry: Entry) -> Record:
    """Put the outputs where DVC expects them and close the entry; returns its record."""
    spec, origin, repository = entry.spec, entry.origin, Repository(root)
    known = place_outputs(entry, root, entry.folder / "publishing")
    remember(repository.home / "hashes.json", known)
    results = [attempt.result for attempt in reversed(entry.attempts())]
    finished = [each for each in results if each and each.outs is not None]
    result = finished[0] if finished else _reconstructed(entry)
    now = time.time()
    record = Record(
        stage=spec.stage,
        fingerprint=spec.fingerprint,
        inputs={item.path: item.hash for item in spec.inputs.values()},
        outs=result.outs or {},
        metrics=result.metrics,
        attempts=len(entry.attempts()),
        started=result.started or now,
        ended=result.ended or now,
        published=now,
        environment=result.environment,
        git_commit=origin.git_commit,
        experiment=origin.experiment,
        invocation=origin.invocation,
        earlier_environments=tuple(earlier_environments(entry, result.environment)),
    )
    files.write(entry.folder / "record.json", record)
    # Not before: a process that shares the work may still be looking through it.
    shutil.rmtree(entry.folder / "scratch", ignore_errors=True)
    handover.leave(repository, spec.stage, known)
    return record


def place_outputs(entry: Entry, root: Path, aside: Path) -> dict[Path, Known]:
    """Give the outputs their names below `root`; the hashes of the files that have two names."""
    places = {path: entry.out / name for name, path in entry.spec.outs.items()}
    places[entry.spec.metrics] = entry.out / METRICS_OUT
    known = out_hashes.read(entry.out)
    for target, source in places.items():
        _place(source, root / target, aside)
    # Another name moves the time of a file's last change.
    linked = {path: each for path in known if (each := _still(path, known[path])) is not None}
    out_hashes.write(entry.out, linked)
    placed = {}
    for target, source in places.items():
        for path in linked:
            if path.is_relative_to(source):
                placed[root / target / path.relative_to(source)] = linked[path]
    return {path: each for path, each in placed.items() if signature_of(path) == each.signature}


def _still(path: Path, known: Known) -> Known | None:
    """The same hash for a file that has got another name; None where it was written to as well."""
    signature = signature_of(path)
    if signature is None or signature[:3] != known.signature[:3]:
        return None
    return Known(signature, known.md5)


def remember(place: Path, known: Mapping[Path, Known]) -> None:
    """Have who keeps hashes in this file know these, too."""
    hashes = HashCache(place)
    hashes.believe(known)
    hashes.save()


def _reconstructed(entry: Entry) -> Result:
    """The result of a worker that was killed after its last rename and before it reported."""
    hashes = HashCache()
    hashes.believe(out_hashes.read(entry.out))
    ended = (entry.out / METRICS_OUT).stat().st_mtime
    # An attempt that found all done, or that never got far, does not know what made it.
    workers = [attempt.worker for attempt in reversed(entry.attempts())]
    worker = next((each for each in workers if each and each.environment), None)
    return Result(
        state=State.COMPLETED,
        outs={path: hashes.of(entry.out / name) for name, path in entry.spec.outs.items()},
        metrics=atomic.read_json(entry.out / METRICS_OUT),
        started=min(worker.time, ended) if worker else ended,
        ended=ended,
        environment=worker.environment if worker else {},
    )


def drop_recorded(root: Path, ledger: Ledger) -> None:
    """Remove the ledger's copy of outputs that dvc.lock names by now."""
    recorded = recorded_outs(root)
    for out in ledger.folder.glob("*/*/out"):
        entry = Entry(out.parent)
        record = entry.record
        if record and record.outs.items() <= recorded.get(entry.stage, {}).items():
            # Renamed first: half a folder must never pass for the outputs.
            doomed = atomic.unique(out)
            shutil.rmtree(doomed, ignore_errors=True)
            with suppress(FileNotFoundError):  # a stage that starts beside this one was faster
                os.replace(out, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def recorded_outs(root: Path) -> dict[str, dict[str, str]]:
    """What dvc.lock says each stage has made: path and hash."""
    return {stage: hashes_of_outs(values) for stage, values in read_stages(root).items()}


def hashes_of_outs(values: Mapping[str, Any]) -> dict[str, str]:
    """What dvc.lock says one stage has made."""
    return {out["path"]: out["md5"] for out in values.get("outs", ()) if "md5" in out}


def _place(source: Path, target: Path, aside: Path) -> None:
    """Give `target` the content of `source` in one step; what was there before goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}{_BESIDE}.*.tmp"):
        atomic.remove(left)  # by a process that was killed
    try:
        _swap(source, target, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # `artifacts` is a link to another disk: the copy is made there, under a name of its own.
        _swap(source, target, atomic.unique(target.with_name(target.name + _BESIDE)))


def _swap(source: Path, target: Path, aside: Path) -> None:
    """Whole or not at all, by renames; EXDEV and nothing done where `aside` is on another disk."""
    new, old = aside / "new", aside / "old"
    atomic.remove(aside)
    try:
        atomic.link_tree(source, new)
        if aside.parent == target.parent:
            atomic.sync_tree(new)
        if target.is_dir() or (new.is_dir() and os.path.lexists(target)):
            target.rename(old)
        os.replace(new, target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        atomic.remove(aside)  # on a full disk, this also makes room
        raise
    atomic.remove(aside)
