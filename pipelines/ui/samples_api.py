"""The Samples page: held-out answers side by side, and the rollouts of an iteration.

What is shown is in Parquet files, which pyarrow reads: it is imported with the first question, so
that the other pages do without it.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import NEEDS_PYARROW, Content
from pipelines.ui.clone import Clone
from pipelines.ui.records import records_of
from pipelines.ui.rollout_files import RUN, RolloutFiles, iterations, of_stage_run, of_workspace

MOST_ROWS = 200
Size = Annotated[int, Query(ge=1, le=MOST_ROWS)]
Start = Annotated[int, Query(ge=0)]


def router(clone: Clone) -> APIRouter:
    api = APIRouter()
    records = records_of(clone.repository)
    evaluations = _once(lambda: _held_out().Evaluations(clone.root, records))

    def files_of(name: str) -> RolloutFiles:
        if not name.startswith(RUN):
            return of_workspace(clone.root, name)
        with records.read() as run_index:
            content = Content(clone.repository, run_index)
            return of_stage_run(clone.root, run_index, content, name.removeprefix(RUN))

    @api.get("/names")
    def names() -> dict[str, Any]:
        """The policies that were evaluated, and the iterations that have rollouts."""
        return {"policies": evaluations().policies(), "iterations": list(iterations(clone.root))}

    @api.get("/answers")
    def answers(
        policy: Annotated[list[str], Query()],
        which: str | None = None,
        task: str | None = None,
        text: str | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        length_min: int | None = None,
        length_max: int | None = None,
        start: Start = 0,
        size: Size = 20,
    ) -> dict[str, Any]:
        held_out = _held_out()
        if which is not None and which not in held_out.WHICH:
            raise LockstepError(f"which is one of {', '.join(held_out.WHICH)}, not {which!r}")
        limits = (reward_min, reward_max, length_min, length_max)
        wanted = held_out.Wanted(which, task, text or None, *limits)
        page: dict[str, Any] = held_out.page(evaluations(), policy, wanted, start, size)
        return page

    @api.get("/sampled")
    def sampled(policy: Annotated[list[str], Query()], prompt_id: str) -> dict[str, Any]:
        found: dict[str, Any] = _held_out().sampled(evaluations(), policy, prompt_id)
        return found

    @api.get("/rollouts")
    def rollouts(
        iteration: str,
        text: str | None = None,
        prompt: str | None = None,
        finish: str | None = None,
        source: str | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        length_min: int | None = None,
        length_max: int | None = None,
        trained: bool | None = None,
        start: Start = 0,
        size: Size = 50,
    ) -> dict[str, Any]:
        rows, wanted = _rollout_rows()
        limits = (reward_min, reward_max, length_min, length_max)
        asked = wanted(text or None, prompt or None, finish, source, *limits, trained)
        page: dict[str, Any] = rows.page(files_of(iteration), asked, start, size)
        return page

    @api.get("/rollout")
    def rollout(iteration: str, row: Start, first_token: Start = 0) -> dict[str, Any]:
        rows, _ = _rollout_rows()
        one: dict[str, Any] = rows.one(files_of(iteration), row, first_token)
        return one

    return api


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    made: list[Any] = []

    def get() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get


def _held_out() -> Any:
    try:
        from pipelines.ui import held_out
    except ModuleNotFoundError as error:
        raise _without(error) from None
    return held_out


def _rollout_rows() -> tuple[Any, Any]:
    try:
        from pipelines.ui import rollout_filter, rollout_rows
    except ModuleNotFoundError as error:
        raise _without(error) from None
    return rollout_rows, rollout_filter.Wanted


def _without(error: ModuleNotFoundError) -> Exception:
    return LockstepError(NEEDS_PYARROW) if error.name == "pyarrow" else error
