"""The Run page: the graph with the live state of every stage, and what may be done about it."""

from typing import Any

from fastapi import APIRouter

from pipelines.runs.status import stage_statuses
from pipelines.ui.clone import Clone


def router(clone: Clone) -> APIRouter:
    api = APIRouter()

    @api.get("/stages")
    def stages() -> dict[str, Any]:
        return {"stages": [each.as_json() for each in stage_statuses(clone.repository)]}

    return api
