"""Where the bytes of an artifact are, if they are on this machine.

They may be in the workspace, in DVC's cache, or in the ledger, which keeps outputs until DVC has
recorded them. The error for a missing artifact says how to restore it: records outlive the bytes.
"""

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.cache_objects import listed_files, object_path
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import Artifact
from pipelines.lineage.naming import role_of
from pipelines.lineage.run_index import RunIndex

NEEDS_PYARROW = (
    "rows are in Parquet files, and pyarrow is not installed here: it comes with the compute plane "
    "(`pip install -e '.[train]'`), or alone by `pip install pyarrow`"
)


class MissingArtifact(LockstepError):
    """The bytes of an artifact are not on this machine."""

    def __init__(self, artifact: Artifact, message: str) -> None:
        super().__init__(message)
        self.artifact = artifact


@dataclass
class Content:
    """The bytes of one clone's artifacts."""

    repository: Repository
    run_index: RunIndex
    _tables: dict[tuple[str, tuple[str, ...] | None], list[dict[str, Any]]] = field(
        default_factory=dict
    )

    def rows(self, artifact: Artifact, columns: tuple[str, ...] | None = None) -> list[Any]:
        """The rows of a Parquet file; raises MissingArtifact. Read once."""
        key = (artifact.hash, columns)
        if key not in self._tables:
            path = self.locate(artifact)
            if path is None:
                raise MissingArtifact(artifact, self.how_to_restore(artifact))
            self._tables[key] = _read(path, columns)
        return self._tables[key]

    def occurrences(self, artifact: Artifact, prompt_id: str) -> tuple[int, str]:
        """How many rows have a prompt, and its text; raises MissingArtifact. Row groups whose
        statistics rule the prompt out are not read."""
        path = self.locate(artifact)
        if path is None:
            raise MissingArtifact(artifact, self.how_to_restore(artifact))
        return _occurrences(path, prompt_id)

    def locate(self, artifact: Artifact) -> Path | None:
        """A file or folder with exactly these bytes."""
        return self._in_workspace(artifact) or self._in_cache(artifact) or self._in_ledger(artifact)

    def files(self, artifact: Artifact) -> dict[str, Path]:
        """The files of a folder with exactly these bytes, by name; raises MissingArtifact."""
        folder = self.locate(artifact)
        if folder is not None:
            inside = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path for path in inside}
        listed = listed_files(object_path(self._cache, artifact.hash), artifact.hash) or {}
        files = {name: object_path(self._cache, digest) for name, digest in sorted(listed.items())}
        if not files or not all(path.is_file() for path in files.values()):
            raise MissingArtifact(artifact, self.how_to_restore(artifact))
        return files

    def _in_workspace(self, artifact: Artifact) -> Path | None:
        path = self.repository.root / artifact.path
        try:
            return path if path.exists() and self._hashes.of(path) == artifact.hash else None
        except OSError:
            return None

    def _in_cache(self, artifact: Artifact) -> Path | None:
        if artifact.hash.endswith(".dir"):
            return None
        path = object_path(self._cache, artifact.hash)
        return path if path.is_file() else None

    def _in_ledger(self, artifact: Artifact) -> Path | None:
        for stage_run in self.run_index.makers(artifact):
            name = role_of(stage_run.stage, artifact.path, among_inputs=False)
            for job in stage_run.jobs:
                path = job.folder / "out" / name if job.folder else None
                if path is not None and path.exists():
                    return path
        return None

    @cached_property
    def _hashes(self) -> HashCache:
        return HashCache(self.repository.home / "hashes.json")

    @cached_property
    def _cache(self) -> Path:
        """The objects of DVC's cache: in the clone, unless DVC's configuration names a folder."""
        folder = self.repository.root / ".dvc"
        configured = None
        # A broken or missing configuration is not what the user asked about.
        with contextlib.suppress(Exception):
            from dvc.config import Config

            configured = Config(str(folder)).get("cache", {}).get("dir")
        return folder / (configured or "cache") / "files" / "md5"

    def how_to_restore(self, artifact: Artifact) -> str:
        """The error message: what is missing, and which command restores the same bytes."""
        text = (
            f"{artifact.path} {artifact.hash} is neither in the workspace nor in DVC's cache; "
            "only its records are left."
        )
        stage_run = next(iter(self.run_index.makers(artifact)), None)
        if stage_run is None:
            return f"{text} It is given data, which no stage produces: restore it from its source"
        if stage_run.in_workspace:
            return (
                f"{text} `dvc pull {artifact.path}` fetches it from a remote; without one, "
                f"`dvc repro {stage_run.stage}` computes the same bytes"
            )
        if stage_run.commits:
            commit = stage_run.commits[-1][:7]
            return (
                f"{text} At commit {commit} (`git worktree add ../at-{commit} {commit}`), "
                f"`dvc pull {artifact.path}` fetches it from a remote, and "
                f"`dvc repro {stage_run.stage}` computes the same bytes"
            )
        entry = f".lockstep/jobs/{stage_run.job.entry}" if stage_run.job else "the record"
        return f"{text} Its params and code are in {entry}: with them, `dvc repro` computes it"


def _read(path: Path, columns: tuple[str, ...] | None) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise LockstepError(NEEDS_PYARROW) from None
    try:
        table = pq.ParquetFile(path)
        wanted = None if columns is None else [c for c in columns if c in table.schema_arrow.names]
        rows: list[dict[str, Any]] = table.read(columns=wanted).to_pylist()
    except (OSError, ValueError) as error:
        raise LockstepError(f"{path}: not readable as Parquet: {error}") from None
    return rows


def _occurrences(path: Path, prompt_id: str) -> tuple[int, str]:
    try:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise LockstepError(NEEDS_PYARROW) from None
    count, text = 0, ""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            columns = [c for c in ("prompt_id", "prompt") if c in file.schema_arrow.names]
            for group in _groups_with(file, prompt_id):
                for batch in file.iter_batches(row_groups=[group], columns=columns):
                    rows = batch.filter(pc.equal(batch["prompt_id"], prompt_id))
                    count += len(rows)
                    if "prompt" in columns and not text and len(rows):
                        text = rows["prompt"][0].as_py() or ""
    except (OSError, ValueError, KeyError) as error:
        raise LockstepError(f"{path}: not readable as Parquet: {error}") from None
    return count, text


def _groups_with(file: Any, prompt_id: str) -> list[int]:
    """The row groups that may have it."""
    wanted = []
    column = next(
        i for i in range(file.metadata.num_columns) if file.schema.column(i).path == "prompt_id"
    )
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(column).statistics
        known = statistics is not None and statistics.has_min_max
        if not known or statistics.min <= prompt_id <= statistics.max:
            wanted.append(group)
    return wanted
