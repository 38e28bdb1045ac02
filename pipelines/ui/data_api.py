"""The Data page: what `prepare` read and dropped, how long rows are, and the rows with tokens."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from pipelines.ui import data_rows
from pipelines.ui.clone import Clone
from pipelines.ui.data_report import lengths, overlaps, read_report
from pipelines.ui.dropped_rows import dropped_rows
from stages.contracts.sources import Role

FromZero = Annotated[int, Query(ge=0)]
Few = Annotated[int, Query(ge=1, le=data_rows.MOST_ROWS)]


def router(clone: Clone) -> APIRouter:
    api = APIRouter()

    @api.get("/report")
    def report() -> dict[str, Any]:
        """The record of `prepare`, and the overlap with held-out prompts."""
        found = read_report(clone.root)
        overlap = [asdict(each) for each in overlaps(clone.root, found.roles)]
        return {**found.as_json(), "overlaps": overlap}

    @api.get("/lengths")
    def length(role: Role) -> dict[str, Any]:
        return {"lengths": [asdict(each) for each in lengths(clone.root, role)]}

    @api.get("/rows")
    def rows(
        role: Role, source: str = "", text: str = "", start: FromZero = 0, limit: Few = 10
    ) -> dict[str, Any]:
        query = data_rows.Query(role, source, text, start, limit)
        return data_rows.find_rows(clone.root, query).as_json()

    @api.get("/dropped")
    def dropped(reason: str = "", start: FromZero = 0, limit: Few = 20) -> dict[str, Any]:
        found = dropped_rows(clone.root)
        chosen = [row for row in found.rows if reason in ("", *row.reason.split(" or "))]
        return {
            "num_rows": len(chosen),
            "rows": [asdict(row) for row in chosen[start : start + limit]],
            "notes": found.notes,
        }

    return api
