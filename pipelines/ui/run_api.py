"""The Run page: the graph with the live state of every stage, and what may be done about it."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from pipelines.base.errors import LockstepError
from pipelines.config.chosen_profile import profile_name
from pipelines.runs.forecast import Forecast, forecast
from pipelines.ui.clone import Clone
from pipelines.ui.run_command import cancel, start_run
from pipelines.ui.run_detail import Curves, detail
from pipelines.ui.run_iterations import Iterations
from pipelines.ui.run_watch import Watch

DEFAULT_TARGET = "report"


class Start(BaseModel):
    model_config = ConfigDict(extra="forbid")
    target: str = DEFAULT_TARGET
    profile: str | None = None


class Cancel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    stage: str | None = None


def router(clone: Clone) -> APIRouter:
    api = APIRouter()
    repository = clone.repository
    watch, curves = Watch(repository), Curves()
    over = Iterations(clone.root)

    def known(stage: str) -> str:
        rows = watch.current().rows
        if stage not in rows:
            raise LockstepError(f"there is no stage {stage!r} here; there are {', '.join(rows)}")
        return stage

    @api.get("/stages")
    def stages() -> dict[str, Any]:
        return watch.current().as_json()

    @api.get("/profiles")
    def profiles() -> dict[str, Any]:
        files = sorted(clone.root.glob("slurm_profiles/*.yaml"))
        return {"profiles": [path.stem for path in files], "default": profile_name()}

    @api.get("/stage")
    def stage(stage: str) -> dict[str, Any]:
        return detail(repository, watch.current().rows[known(stage)], curves)

    @api.get("/iterations")
    def iterations() -> dict[str, Any]:
        return {"groups": over.groups(watch.current().rows.values())}

    @api.get("/plan")
    def plan(target: str = DEFAULT_TARGET, profile: str | None = None) -> dict[str, Any]:
        return _plan(forecast(clone.root, [target], profile))

    @api.post("/start")
    def start(what: Start) -> dict[str, str]:
        target = what.target if what.target == DEFAULT_TARGET else known(what.target)
        return {"said": start_run(repository, [target], profile_name(what.profile))}

    @api.post("/cancel")
    def end(what: Cancel) -> dict[str, str]:
        return {"said": cancel(repository, known(what.stage) if what.stage else None)}

    @api.get("/events")
    async def events(
        request: Request,
        since: Annotated[str | None, Query()] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> StreamingResponse:
        """Server-sent events; a page that was cut off says which version it has."""
        is_ending = getattr(request.app.state, "is_ending", lambda: False)

        async def stream() -> AsyncIterator[str]:
            async for change in watch.changes(last_event_id or since, is_ending):
                if change is None:
                    yield ": here\n\n"
                else:
                    yield f"id: {change['version']}\ndata: {json.dumps(change)}\n\n"

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    return api


def _plan(seen: Forecast) -> dict[str, Any]:
    stages = []
    for stage in seen.stale:
        name = stage.address.split("@")[0]
        last, use = seen.times.get(stage.address), seen.memory[name]
        resources = seen.resources[name]
        stages.append(
            {
                **asdict(stage),
                "gpus": resources.nodes * resources.gpus_per_node,
                "memory": str(use) if use else None,
                "last_time": last.as_json() if last else None,
            }
        )
    return {
        "profile": seen.profile,
        "stages": stages,
        "up_to_date": len(seen.planned) - len(seen.stale),
        "unfit": seen.unfit,
    }
