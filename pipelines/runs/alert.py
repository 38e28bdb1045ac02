"""The flow that tells of a flow run what no stage can: that it crashed, or failed around them.

Prefect's automation starts it (`pipelines/servers/automations.py`). It sends by the ways of the
profile that the flow run had, in the environment of the worker, so `$NAME` is read there.
"""

import socket
import time
from typing import Any
from uuid import UUID

from prefect import flow, get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.states import Completed

from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.notify import Notify, NotifyOn
from pipelines.config.profiles import load_profile
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.notify_send import ways_of

TRIES_AGAIN = 5
PAUSE_S = 60


@flow(name="lockstep-alert", persist_result=False)
def alert(resource: str) -> State[Any]:
    """Tell of a flow run by all ways of its profile.

    Args:
        resource: Prefect's name of the flow run, prefect.flow-run.ID.
    """
    repository = Repository.find()
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(resource.rpartition(".")[2]))
    profile, notify = _notify_of(repository, run)
    if notify is None or NotifyOn.FAILED not in notify.on:
        return Completed(message=f"profile {profile} asks for no word of failures")
    message = _message(repository, run, profile)
    told = [_tell.submit(way, profile, message) for way in ways_of(notify)]
    for each in told:
        each.result()  # raises what kept it from being told
    return Completed(message=f"told by {', '.join(ways_of(notify))}")


def _notify_of(repository: Repository, run: FlowRun) -> tuple[str, Notify | None]:
    """Of its profile; of the worker's where that is what the run failed of."""
    wanted = run.parameters.get("profile")
    try:
        name = profile_name(wanted)
        return name, load_profile(repository.root, name).notify
    except LockstepError:
        name = profile_name(None)
        return name, load_profile(repository.root, name).notify


def _message(repository: Repository, run: FlowRun, profile: str) -> dict[str, Any]:
    """With the keys of a stage's messages."""
    state = ((run.state and run.state.name) or NotifyOn.FAILED.value).lower()
    error = redact((run.state and run.state.message) or "") or None
    first = error.splitlines()[0] if error else "nothing is known of why"
    return {
        "text": f"flow run {run.name} {state}: {first} ({repository.root.name})",
        "event": NotifyOn.FAILED.value,
        "flow_run": run.name,
        "stage": None,
        "state": state,
        "error": error,
        "warnings": [],
        "attempts": run.run_count,
        "profile": profile,
        "job": None,
        "host": socket.gethostname(),
        "commit": repository.git_commit(),
        "experiment": None,
        "mlflow_url": None,
        "clone": str(repository.root),
        "log": None,
        "time": run.state.timestamp.timestamp() if run.state else time.time(),
    }


def _may_be_heard_later(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not isinstance(error, RefusedError)


@task(
    task_run_name="{way}",
    retries=TRIES_AGAIN,
    retry_delay_seconds=PAUSE_S,
    retry_condition_fn=_may_be_heard_later,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def _tell(way: str, profile: str, message: dict[str, Any]) -> None:
    notify = load_profile(Repository.find().root, profile).notify
    assert notify is not None
    try:
        ways_of(notify)[way](message)
    except (RefusedError, UnreachableError) as error:
        raise type(error)(redact(str(error))) from None
