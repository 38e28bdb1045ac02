"""The Lineage page: what made a target and what came of it, why two differ, where a prompt went."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import NEEDS_PYARROW, Content
from pipelines.ui import lineage_view
from pipelines.ui.clone import Clone
from pipelines.ui.records import records_of
from pipelines.ui.rollout_files import find_stage_run

DEEPEST = 12
"""Levels of a nested list that a person can follow."""


def router(clone: Clone) -> APIRouter:
    api = APIRouter()
    records = records_of(clone.repository)

    @api.get("/names")
    def names() -> dict[str, Any]:
        """What may be asked about."""
        with records.read() as run_index:
            return {"names": lineage_view.names(run_index), "notes": run_index.notes[:]}

    @api.get("/tree")
    def tree(
        target: str, down: bool = False, depth: Annotated[int, Query(ge=1, le=DEEPEST)] = 2
    ) -> dict[str, Any]:
        with records.read() as run_index:
            asked = target.strip()
            return lineage_view.tree(clone.repository, run_index, asked, down=down, depth=depth)

    @api.get("/diff")
    def diff(old: str, new: str) -> dict[str, Any]:
        with records.read() as run_index:
            return lineage_view.diff(clone.repository, run_index, old.strip(), new.strip())

    @api.get("/prompt")
    def prompt(prompt: str) -> dict[str, Any]:
        with records.read() as run_index:
            content = Content(clone.repository, run_index)
            return lineage_view.prompt(content, run_index, prompt)

    @api.get("/rows")
    def rows(
        run: str,
        prompt: str | None = None,
        start: Annotated[int, Query(ge=0)] = 0,
        size: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> dict[str, Any]:
        """The data that a stage run was trained on, by its id."""
        with records.read() as run_index:
            content = Content(clone.repository, run_index)
            stage_run = find_stage_run(run_index, run)
            artifact, path = lineage_view.data_file(content, stage_run)
        try:
            shown = lineage_view.data_rows(path, start, size, prompt or None)
        except ModuleNotFoundError as error:
            raise LockstepError(NEEDS_PYARROW) from error
        return {"stage": stage_run.stage, **vars(artifact), **shown}

    return api
