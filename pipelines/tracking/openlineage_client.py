"""Events in OpenLineage's own words, and the client that sends them; only this imports openlineage.

A stage is a job, an entry of the ledger a run, whatever the number of its attempts; the command
behind it is the parent run. Inputs and outputs are datasets named by their path in the repository,
in one namespace with the jobs, so that two clones speak of the same things; their version is the
hash that DVC knows them by.
"""

import os
import platform
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, cast

from openlineage.client import OpenLineageClient, set_producer
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    JobFacet,
    RunFacet,
    dataset_version_dataset,
    error_message_run,
    execution_parameters_run,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
    source_code_location_job,
)
from openlineage.client.uuid import generate_static_uuid

from pipelines.base.redact import redact, without_credentials
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry
from pipelines.slurm.outcome import outcome_of
from pipelines.tracking.cursor import entry_identity, invocation_of
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.openlineage_events import COMPLETE, FAIL, START
from pipelines.tracking.stage import (
    ended_at,
    flat_params,
    iteration_of,
    place_of,
    started_at,
    where_it_runs,
)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"unknown, on Python {platform.python_version()}"


PRODUCER = f"pkg:generic/lockstep-rlhf@{_version_of('lockstep-rlhf')}"
"""This program and its version, as a package URL."""
set_producer(PRODUCER)

_REFUSED = (400, 409, 413, 422)
"""What an endpoint says to an event that it will not take the next time either."""
_CLOSE_S = 10.0


class Client:
    """Sends events the way openlineage-python is configured to."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        before = dict(os.environ)
        self._client = OpenLineageClient()
        # It notes settings under further names in the environment, where they would look like ours.
        for name in set(os.environ) - set(before):
            del os.environ[name]
        self._namespace = os.environ.get("OPENLINEAGE_NAMESPACE") or "lockstep"
        if self._client.transport.kind == "console" and not self._client.config.transport:
            raise ValueError("its configuration names no transport, or cannot be read")

    def emit(self, entry: Entry, event: str) -> None:
        """Send one event about an entry."""
        made = make_event(self._repository, entry, event, self._namespace)
        try:
            self._client.emit(made)
        except Exception as error:
            # Every transport has errors of its own; requests' say what the endpoint answered.
            answer = getattr(getattr(error, "response", None), "status_code", None)
            kind = RefusedError if answer in _REFUSED else UnreachableError
            raise kind(str(error) or type(error).__name__) from error

    def close(self) -> None:
        self._client.close(_CLOSE_S)


def make_event(repository: Repository, entry: Entry, event: str, namespace: str) -> RunEvent:
    """All that the ledger says about an entry, as one event."""
    spec = entry.spec
    inputs = {item.path: item.hash for item in spec.inputs.values()}
    outs = entry.outs if event == COMPLETE else {}
    return RunEvent(
        eventType=RunState[event],
        eventTime=_time(entry, event),
        run=Run(runId=run_id(entry), facets=_run_facets(entry, event, namespace)),
        job=Job(namespace=namespace, name=spec.stage, facets=_job_facets(repository, entry)),
        inputs=[
            InputDataset(namespace=namespace, name=path, facets=_version(digest))
            for path, digest in sorted(inputs.items())
        ],
        outputs=[
            OutputDataset(
                namespace=namespace,
                name=path,
                facets=_version(outs[path]) if path in outs else {},
                outputFacets=_statistics(repository, entry, name) if path in outs else {},
            )
            for name, path in sorted(spec.outs.items(), key=lambda item: item[1])
        ],
    )


def run_id(entry: Entry) -> str:
    """The same for every event of an entry, whoever sends it and however often."""
    created = datetime.fromtimestamp(entry.origin.created, UTC)
    return str(generate_static_uuid(created, entry_identity(entry).encode()))


def _time(entry: Entry, event: str) -> str:
    attempts = entry.attempts()
    attempt = attempts[0 if event == START else -1] if attempts else None
    worker = attempt.worker if attempt else None
    ended = event not in (START, "RUNNING")
    seconds = ended_at(entry) if ended else worker.time if worker else started_at(entry)
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _version(digest: str) -> dict[str, Any]:
    facet = dataset_version_dataset.DatasetVersionDatasetFacet(digest)
    return {"version": facet}


def _statistics(repository: Repository, entry: Entry, name: str) -> dict[str, Any]:
    """Bytes and files, while the output is still where the stage or DVC left it."""
    place = place_of(repository, entry, name)
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    if not files:
        return {}
    size = sum(path.stat().st_size for path in files)
    facet = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        size=size, fileCount=len(files)
    )
    return {"outputStatistics": facet}


def _job_facets(repository: Repository, entry: Entry) -> dict[str, JobFacet]:
    facets: dict[str, JobFacet] = {
        "jobType": job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration="LOCKSTEP", jobType="STAGE"
        )
    }
    if origin := repository.git("remote", "get-url", "origin"):
        url = redact(without_credentials(origin))
        commit = (entry.origin.git_commit or "").removesuffix("+")
        facets["sourceCodeLocation"] = source_code_location_job.SourceCodeLocationJobFacet(
            type="git",
            url=url,
            repoUrl=url,
            path=f"stages/{entry.spec.name}.py",
            version=commit or None,
        )
    return facets


def _run_facets(entry: Entry, event: str, namespace: str) -> dict[str, RunFacet]:
    invocation = invocation_of(entry)
    parent = str(uuid.uuid5(uuid.NAMESPACE_URL, f"lockstep:invocation:{invocation.id}"))
    # Two words name the command; what follows are the arguments of one run of it.
    command = " ".join(redact(invocation.command).split()[:2])
    params = flat_params(_clean(entry.spec.config))
    facets: dict[str, RunFacet] = {
        "parent": parent_run.ParentRunFacet(
            run=parent_run.Run(runId=parent), job=parent_run.Job(namespace=namespace, name=command)
        ),
        "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
            version=_version_of("lockstep-rlhf"),
            name="lockstep",
            openlineageAdapterVersion=_version_of("openlineage-python"),
        ),
        "executionParameters": execution_parameters_run.ExecutionParametersRunFacet(
            parameters=[
                execution_parameters_run.ExecutionParameter(key=key, value=value)
                for key, value in params.items()
            ]
        ),
    }
    ours = LockstepRunFacet()
    facets["lockstep"] = cast(RunFacet, ours.with_additional_properties(**_clean(_details(entry))))
    if event == FAIL:
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            message=redact(_error(entry)), programmingLanguage="Python"
        )
    return facets


class LockstepRunFacet(RunFacet):
    """What has no place among OpenLineage's own facets; docs/openlineage.json says its form."""

    @staticmethod
    def _get_schema() -> str:
        return f"{PRODUCER}#docs/openlineage.json"


def _details(entry: Entry) -> dict[str, Any]:
    attempts, spec, origin = entry.attempts(), entry.spec, entry.origin
    end = entry.record or (attempts[-1].result if attempts else None)
    details = {
        "fingerprint": spec.fingerprint,
        "code": spec.code,
        "gitCommit": origin.git_commit,
        "dvcExperiment": origin.experiment,
        "iteration": iteration_of(spec),
        "attempts": len(attempts),
        **where_it_runs(attempts),
        "environment": end.environment if end else None,
        "metrics": end.metrics if end else None,
    }
    return {key: value for key, value in details.items() if value}


def _error(entry: Entry) -> str:
    attempt = entry.attempts()[-1]
    result = attempt.result
    if result and result.error:
        return result.error
    return (
        outcome_of(attempt).what
        if attempt.on_slurm
        else "the job exited without reporting a result"
    )


def _clean(value: Any) -> Any:
    """The same without the secrets of this process's environment."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return redact(value) if isinstance(value, str) else value
