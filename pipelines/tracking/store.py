"""MLflow, as far as the shipper uses it. No other imports its client at the top.

Every text that goes out is redacted here. Every call may be repeated after a kill without harm: a
run is looked for by a tag that is its own before it is made, params and tags are set to the same
values, files are put in the place of the same files. What goes wrong is one of three things: MLflow
cannot be reached (try again later), the run is not there any more (make it again), or it refuses
what it was given (trying again would not help).
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from pipelines.base import atomic
from pipelines.base.redact import Redaction, redact
from pipelines.base.repository import Repository
from pipelines.tracking.cursor import URI_VARIABLE, Cursor, database, store_address, tracking_uri
from pipelines.tracking.errors import (
    ArtifactsUnreachableError,
    MissingError,
    RefusedError,
    UnreachableError,
)
from pipelines.tracking.metrics import LARGEST_BATCH, Point, safe_name

EXPERIMENT_VARIABLES = ("LOCKSTEP_EXPERIMENT", "MLFLOW_EXPERIMENT_NAME")
DEFAULT_EXPERIMENT = "lockstep"
LARGEST_BATCH_OF_PARAMS = 100
_TABLES_TAG = "mlflow.loggedArtifacts"
_CONTEXT_TAG = "mlflow.data.context"


@contextmanager
def _translated(otherwise: type[UnreachableError]) -> Iterator[None]:
    """Turn whatever a client raises into what the shipper can act on."""
    try:
        yield
    except (UnreachableError, RefusedError):
        raise
    except Exception as error:
        raise _meaning(error, otherwise)(_first_line(error)) from error


def _meaning(error: Exception, otherwise: type[UnreachableError]) -> type[Exception]:
    if not isinstance(error, MlflowException):
        return otherwise
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return MissingError
    return RefusedError if error.get_http_status_code() in (400, 409) else otherwise


def _first_line(error: Exception) -> str:
    return redact(f"{type(error).__name__}: {error}").split("\n", 1)[0][:500]


@dataclass(frozen=True)
class Version:
    """One version of a registered model."""

    number: str
    source: str
    run_id: str | None
    tags: Mapping[str, str]
    description: str


class Store:
    """One experiment of one MLflow."""

    @_translated(UnreachableError)
    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.address = store_address(repository)
        if not os.environ.get(URI_VARIABLE):
            _make_database(database(repository))
        self._client = MlflowClient(tracking_uri(repository))
        self.experiment_name = next(
            filter(None, map(os.environ.get, EXPERIMENT_VARIABLES)), DEFAULT_EXPERIMENT
        )
        self.experiment_id = self._experiment()
        self._open: dict[str, str] = {}
        """The runs that are RUNNING, and what becomes of each if nobody comes back to it."""

    @_translated(UnreachableError)
    def find_run(self, tags: Mapping[str, str]) -> str | None:
        """The oldest run with these tags, among those that nobody deleted."""
        wanted = " and ".join(f"tags.`{safe_name(key)}` = '{value}'" for key, value in tags.items())
        runs = self._client.search_runs(
            [self.experiment_id], wanted, ViewType.ACTIVE_ONLY, 1, ["attributes.start_time ASC"]
        )
        return str(runs[0].info.run_id) if runs else None

    @_translated(UnreachableError)
    def find_or_create_run(
        self, identity: tuple[str, str], name: str, tags: Mapping[str, str | None], started: float
    ) -> str:
        """The run whose tag has this value, made if there is none."""
        key, value = identity[0], identity[1].replace("'", "_")
        run = self.find_run({key: value})
        if run is None:
            given = {key: value, **_texts(tags)}
            made = self._client.create_run(
                self.experiment_id, _milliseconds(started), given, redact(name)[:250]
            )
            run = str(made.info.run_id)
        self._open[run] = "KILLED"
        return run

    def attach(
        self,
        cursor: Cursor,
        identity: tuple[str, str],
        name: str,
        tags: Mapping[str, str | None],
        started: float,
    ) -> None:
        """Find or make the run that the cursor is about; the caller saves the cursor."""
        cursor.run_id = self.find_or_create_run(identity, name, tags, started)
        cursor.experiment_id = self.experiment_id
        cursor.url = self.url(cursor.run_id)

    @_translated(UnreachableError)
    def set_params(self, run_id: str, params: Mapping[str, str]) -> None:
        items = [Param(key, value) for key, value in _texts(params).items()]
        for start in range(0, len(items), LARGEST_BATCH_OF_PARAMS):
            self._client.log_batch(run_id, params=items[start : start + LARGEST_BATCH_OF_PARAMS])

    @_translated(UnreachableError)
    def set_tags(self, run_id: str, tags: Mapping[str, str | None]) -> None:
        self._client.log_batch(
            run_id, tags=[RunTag(key, value) for key, value in _texts(tags).items()]
        )

    @_translated(UnreachableError)
    def tags(self, run_id: str, prefix: str) -> dict[str, str]:
        """The run's tags whose names begin so."""
        tags = self._client.get_run(run_id).data.tags
        return {key: value for key, value in tags.items() if key.startswith(prefix)}

    @_translated(UnreachableError)
    def drop_tags(self, run_id: str, keys: Iterable[str]) -> None:
        """Take tags away that the run is known to have."""
        for key in keys:
            self._client.delete_tag(run_id, key)

    @_translated(UnreachableError)
    def set_inputs(self, run_id: str, inputs: Iterable[tuple[str, str, str]]) -> None:
        """Dataset inputs: (what the stage calls it, path, DVC hash)."""
        names: dict[tuple[str, str], list[str]] = {}
        for name, path, digest in inputs:
            names.setdefault((path, digest), []).append(name)
        datasets = [
            DatasetInput(
                Dataset(path, digest, "dvc", json.dumps({"path": path, "md5": digest})),
                # MLflow keeps one input for one path and digest, whatever number of uses it has.
                [InputTag(_CONTEXT_TAG, ", ".join(used_as))],
            )
            for (path, digest), used_as in names.items()
        ]
        if datasets:
            self._client.log_inputs(run_id, datasets)

    @_translated(UnreachableError)
    def log(self, run_id: str, points: Sequence[Point]) -> None:
        for start in range(0, len(points), LARGEST_BATCH):
            self._client.log_batch(
                run_id,
                [
                    Metric(point.key, point.value, _milliseconds(point.time), point.step)
                    for point in points[start : start + LARGEST_BATCH]
                ],
            )

    @_translated(UnreachableError)
    def last_steps(self, run_id: str, prefix: str) -> dict[str, int]:
        """The last step of each metric whose name begins so."""
        keys = [key for key in self._client.get_run(run_id).data.metrics if key.startswith(prefix)]
        return {
            key: max(metric.step for metric in self._client.get_metric_history(run_id, key))
            for key in keys
        }

    @_translated(UnreachableError)
    def set_status(self, run_id: str, status: str, ended: float | None) -> None:
        if ended is None:
            self._client.update_run(run_id, status)
            self._open.setdefault(run_id, "KILLED")
        else:
            self._client.set_terminated(run_id, status, _milliseconds(ended))
            self._open.pop(run_id, None)

    def if_abandoned(self, run_id: str, status: str) -> None:
        """Say how a run that is still open is to be closed if nothing more is heard of it."""
        if run_id in self._open:
            self._open[run_id] = status

    def abandon(self) -> None:
        """Close every run that this process left open."""
        for run_id, status in list(self._open.items()):
            self.set_status(run_id, status, time.time())

    @_translated(ArtifactsUnreachableError)
    def put_text(self, run_id: str, path: str, text: str) -> None:
        self._client.log_text(run_id, redact(text), path)

    @_translated(ArtifactsUnreachableError)
    def put_yaml(self, run_id: str, path: str, values: Mapping[str, Any]) -> None:
        self._client.log_dict(run_id, json.loads(redact(json.dumps(values))), path)

    @_translated(ArtifactsUnreachableError)
    def put_folder(self, run_id: str, path: str, folder: Path) -> None:
        """Every file, as it is: for what a stage made to be looked at."""
        self._client.log_artifacts(run_id, str(folder), path)

    def put_tables(self, run_id: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Tables as MLflow's own `log_table` writes them, which would append on a second call."""
        for name, rows in tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            text = json.dumps({"columns": columns, "data": data}, ensure_ascii=False)
            self.put_text(run_id, _table_path(name), text)

    def list_tables(self, run_id: str, names: Iterable[str]) -> None:
        """Tell the run comparison which artifacts are tables."""
        listed = [{"path": _table_path(name), "type": "table"} for name in sorted(names)]
        self.set_tags(run_id, {_TABLES_TAG: json.dumps(listed)})

    @_translated(UnreachableError)
    def artifact_uri(self, run_id: str) -> str:
        return str(self._client.get_run(run_id).info.artifact_uri)

    @_translated(UnreachableError)
    def find_version(self, name: str, tags: Mapping[str, str]) -> Version | None:
        """The oldest version of a registered model with these tags."""
        versions = [
            version
            for version in self._client.search_model_versions(f"name = '{name}'")
            if tags.items() <= version.tags.items()
        ]
        return _version(min(versions, key=lambda each: int(each.version))) if versions else None

    @_translated(UnreachableError)
    def create_version(
        self,
        name: str,
        source: str,
        run_id: str,
        tags: Mapping[str, str | None],
        *,
        description: str,
        about: str,
    ) -> Version:
        """A version of a registered model, which is made, with a word about it, if it is not there.

        Two processes that register at the same moment make two versions: nothing in MLflow could
        keep them from it. Both say the same.
        """
        if not self._client.search_registered_models(f"name = '{name}'", max_results=1):
            try:
                self._client.create_registered_model(name, description=about)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        return _version(
            self._client.create_model_version(
                name, source, run_id, _texts(tags), description=redact(description)
            )
        )

    def is_described(
        self, version: Version, tags: Mapping[str, str | None], description: str
    ) -> bool:
        """Whether a version has these tags and this description."""
        same = _texts(tags).items() <= version.tags.items()
        return same and version.description == redact(description)

    @_translated(UnreachableError)
    def describe_version(
        self, name: str, version: Version, tags: Mapping[str, str | None], description: str
    ) -> None:
        """Set anew what differs."""
        if version.description != redact(description):
            self._client.update_model_version(name, version.number, redact(description))
        for key, value in _texts(tags).items():
            if version.tags.get(key) != value:
                self._client.set_model_version_tag(name, version.number, key, value)

    @_translated(UnreachableError)
    def set_alias(self, name: str, alias: str, version: str) -> None:
        if self._client.get_registered_model(name).aliases.get(alias) != version:
            self._client.set_registered_model_alias(name, alias, version)

    def url(self, run_id: str) -> str | None:
        """Where a browser shows the run, if a server is known."""
        servers = atomic.read_json(self._repository.shared_home / "servers.json") or {}
        base: str | None = self.address
        if not self.address.startswith(("http://", "https://")):
            base = (servers.get("mlflow") or {}).get("url")
        return f"{base.rstrip('/')}/{self.fragment(run_id)}" if base else None

    def fragment(self, run_id: str) -> str:
        """The run's place within MLflow's pages."""
        return f"#/experiments/{self.experiment_id}/runs/{run_id}?workflowType=machine_learning"

    def _experiment(self) -> str:
        name = self.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = None
            if not os.environ.get(URI_VARIABLE):
                place = str(self._repository.shared_home / "mlartifacts")
            # The kind spares a newcomer a question in MLflow's pages.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(self._client.create_experiment(name, place, kind))
        if experiment.lifecycle_stage != "active":
            raise UnreachableError(
                f"its experiment {name!r} was deleted: restore it, or name another by "
                f"{EXPERIMENT_VARIABLES[0]}"
            )
        return str(experiment.experiment_id)


def _version(version: Any) -> Version:
    return Version(
        str(version.version),
        str(version.source),
        version.run_id,
        dict(version.tags),
        version.description or "",
    )


def _make_database(path: Path) -> None:
    """Make the tables aside: a kill during MLflow's migrations leaves a file it cannot repair."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = atomic.unique(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        make_tables(aside / path.name)
        os.link(aside / path.name, path)
    except FileExistsError:
        pass
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def make_tables(path: Path) -> None:
    """A database with no runs, by all of MLflow's migrations, which take seconds."""
    MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)


def _table_path(name: str) -> str:
    return f"tables/{name}.json"


def _texts(values: Mapping[str, str | None]) -> dict[str, str]:
    hidden = Redaction(os.environ)  # hundreds of values, for each of which it would look anew
    return {safe_name(key): hidden(value) for key, value in values.items() if value is not None}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
