"""Stage runs from MLflow, for what the ledger of this clone does not have.

MLflow is queried only where MLFLOW_TRACKING_URI is set and a stage run has no job record here, or
where an id is known nowhere else; only then is mlflow imported. A run is found by the hashes of its
outputs and has its job's record among its artifacts. If MLflow does not answer, a note says so.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines.base.repository import Repository
from pipelines.lineage.jobs import stage_run_of
from pipelines.lineage.stage_run import AttemptRecord, Job, StageRun
from pipelines.tracking.cursor import URI_VARIABLE, database, store_address, tracking_uri
from pipelines.tracking.metrics import safe_name

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"


class Runs:
    """The runs of one MLflow. After one failure to answer it is not queried again."""

    def __init__(self, repository: Repository, notes: list[str]) -> None:
        self._repository = repository
        self._notes = notes
        self._client: Any = None
        self._experiments: list[str] = []
        self._silent = False

    @property
    def is_shared(self) -> bool:
        """Whether an MLflow is configured that may have what this clone does not."""
        return bool(os.environ.get(URI_VARIABLE))

    def jobs(self, stage_runs: Iterable[StageRun]) -> dict[StageRun, Job]:
        """The jobs of stage runs that have none."""
        runs = ((stage_run, self._find(stage_run)) for stage_run in stage_runs)
        return {stage_run: self._job(run)[0] for stage_run, run in runs if run is not None}

    def stage_run(self, run_id: str) -> StageRun | None:
        """The stage run behind a run id; None for the parent run of a whole command."""
        if not self.is_shared and not database(self._repository).exists():
            return None
        run = self._ask(lambda client: client.get_run(run_id), quiet=True)
        if run is None:
            return None
        job, record = self._job(run)
        spec = self._artifact(run_id, "spec.json")
        if not spec or not record.get("outs"):
            return None
        return stage_run_of(spec, record["outs"], job)

    def _find(self, stage_run: StageRun) -> Any:
        wanted = " and ".join(
            f"tags.`{safe_name(f'lockstep.out.{path}')}` = '{digest}'"
            for path, digest in stage_run.outs.items()
            if not path.startswith("metrics/")
        )
        if not wanted:
            return None
        where = f"{wanted} and tags.`lockstep.address` = '{stage_run.stage}'"
        runs = self._ask(
            lambda client: client.search_runs(
                self._experiments, where, max_results=1, order_by=["attributes.start_time DESC"]
            )
        )
        return runs[0] if runs else None

    def _job(self, run: Any) -> tuple[Job, Mapping[str, Any]]:
        tags, run_id = run.data.tags, run.info.run_id
        record = self._artifact(run_id, "record.json") or {}
        last = AttemptRecord(
            number=int(tags.get("lockstep.attempts") or 1),
            executor=tags.get("lockstep.executor"),
            profile=tags.get("lockstep.profile"),
            job=tags.get("lockstep.job"),
            host=tags.get("lockstep.host"),
            state=tags.get("lockstep.state") or "?",
        )
        address = store_address(self._repository)
        place = f"#/experiments/{run.info.experiment_id}/runs/{run_id}"
        job = Job(
            entry=f"MLflow run {run_id}",
            state=last.state,
            commit=tags.get("lockstep.git_commit"),
            experiment=tags.get("lockstep.dvc_experiment"),
            command=(record.get("invocation") or {}).get("command"),
            fingerprint=tags.get("lockstep.fingerprint"),
            environment=record.get("environment") or {},
            earlier_environments=tuple(record.get("earlier_environments") or ()),
            started=record.get("started"),
            ended=record.get("ended"),
            attempts=(last,),
            mlflow_run=run_id,
            mlflow_url=f"{address.rstrip('/')}/{place}" if address.startswith("http") else None,
        )
        return job, record

    def _artifact(self, run_id: str, name: str) -> dict[str, Any] | None:
        with tempfile.TemporaryDirectory() as folder:
            path = self._ask(lambda client: client.download_artifacts(run_id, name, folder))
            try:
                values = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
            except (OSError, ValueError):
                return None
        return values if isinstance(values, dict) else None

    def _ask(self, question: Any, *, quiet: bool = False) -> Any:
        """An answer, or None and a note: MLflow is never required."""
        if self._silent:
            return None
        try:
            if self._client is None:
                from pipelines.tracking.rounds import SETTINGS

                for name, value in {**SETTINGS, _TIMEOUT: "5"}.items():
                    os.environ.setdefault(name, value)
                from mlflow import MlflowClient

                client = MlflowClient(tracking_uri(self._repository))
                self._experiments = [
                    item.experiment_id for item in client.search_experiments(max_results=1000)
                ]
                self._client = client
            return question(self._client)
        except ModuleNotFoundError:
            self._silent = True
            self._notes.append(f"mlflow is not installed here: {URI_VARIABLE} is not used")
        except Exception as error:
            # Whatever a client raises: a server that is down, refuses, or has no such run.
            reached = self._client is not None
            self._silent = not reached
            if not (quiet and reached):
                text = str(error).split("\n", 1)[0][:200]
                self._notes.append(
                    f"MLflow at {store_address(self._repository)} does not answer ({text}): jobs "
                    "and environments are shown only where the ledger has them"
                )
        return None
