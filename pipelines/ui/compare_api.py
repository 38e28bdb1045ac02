"""The Compare page: what `lockstep compare` and `lockstep plan -S` say, as JSON and to download.

Numbers are those of `Comparison.as_json`. Beside them are the texts that the command prints, so
that a number is written the same on the page, in the terminal and in the file for a review.
"""

import json
from dataclasses import asdict
from threading import Lock
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from pipelines.lineage.facts import value_text
from pipelines.results.compare import MOST_SIDES, Comparison, compare
from pipelines.results.compare_page import compare_page
from pipelines.results.compare_text import cell, pair_numbers, told
from pipelines.ui.clone import Clone
from pipelines.ui.compare_names import revisions
from pipelines.ui.plan_change import plan_change
from stages.reporting.vocabulary import describe

Sides = Annotated[list[str], Query()]
Limit = Annotated[int, Query(ge=0)]
Settings = Annotated[list[str], Query(alias="set")]


def router(clone: Clone) -> APIRouter:
    api = APIRouter()
    planning = Lock()

    @api.get("/names")
    def names() -> dict[str, Any]:
        """What can be named."""
        found = [asdict(each) for each in revisions(clone.repository)]
        return {"revisions": found, "most_sides": MOST_SIDES}

    @api.get("/sides")
    def sides(side: Sides, limit: Limit = 5) -> dict[str, Any]:
        """A comparison; of each pair no more than `limit` samples, 0: all."""
        found = compare(clone.repository, side)
        return {"comparison": found.as_json(limit or None), "shown": _shown(found)}

    @api.get("/compare.json")
    def as_json(side: Sides) -> Response:
        found = compare(clone.repository, side).as_json(None)
        return _download(json.dumps(found, indent=2), "compare.json", "application/json")

    @api.get("/compare.html")
    def as_page(side: Sides, limit: Limit = 5) -> Response:
        """One file for a review."""
        page = compare_page(compare(clone.repository, side), limit or None)
        return _download(page, "compare.html", "text/html; charset=utf-8")

    @api.get("/plan")
    def plan(settings: Settings, profile: str | None = None) -> dict[str, Any]:
        """What `dvc exp run -S` with these settings would run; nothing is written."""
        with planning:  # DVC's lock refuses a second one
            return plan_change(clone.root, settings, profile).as_json()

    return api


def _download(text: str, name: str, kind: str) -> Response:
    """A file to keep: it is not shown as a page of this server."""
    return Response(
        text, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


def _shown(found: Comparison) -> dict[str, Any]:
    """The texts of its values, in the same order."""
    return {
        "sides": [told(side) for side in found.sides],
        "params": [[value_text(value) for value in each.values] for each in found.params],
        "metrics": [[cell(row.name, value) for value in row.values] for row in found.metrics],
        "meanings": [describe(row.name).meaning for row in found.metrics],
        "pairs": [[row for row in pair_numbers(pair) if row[1]] for pair in found.pairs],
    }
