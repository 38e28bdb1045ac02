from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS, Json, Profile, Targets

if TYPE_CHECKING:
    from pipelines.runs.cost import PlanCost


def plan(
    targets: Targets = None,
    profile: Profile = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "-S",
            "--set-param",
            metavar="KEY=VALUE",
            help="as in `dvc exp run -S`: what this would change; params.yaml stays as it is",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="show what takes the memory of each stage")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what would run, why it is stale, on which resources, its last time and its memory."""
    import json

    from pipelines.base.repository import Repository
    from pipelines.runs.cost import cost_of_plan

    cost = cost_of_plan(Repository.find(), targets or DEFAULT_TARGETS, profile, settings)
    if as_json:
        print(json.dumps(cost.rows(), indent=2))
        return
    for line in _lines(cost, memory=memory):
        print(line)
    for refusal in cost.refusals:
        print(f"does not fit: {refusal}")
    if cost.unknown:
        print(cost.unknown)
    for line in cost.summary():
        print(line)


def _lines(cost: "PlanCost", *, memory: bool) -> list[str]:
    """A line for each stage that is stale, in columns."""
    width = max(len(each.stage.address) for each in cost.stages)
    needed = max((len(str(each.memory or "")) for each in cost.stale), default=0)
    clock = max((len(each.took) for each in cost.stale), default=0)
    lines = []
    for each in cost.stale:
        stage = each.stage
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        last = f"{each.took:<{clock}}  " if clock else ""
        needs = str(each.memory or "")
        what = f"{needs:<{needed}}  {reasons}" if needed else reasons
        lines.append(f"{each.how:<8}{stage.address:<{width}}  {each.where:<22}  {last}{what}")
        parts = each.memory.breakdown() if memory and each.memory else ()
        lines += [f"{'':<8}{part}" for part in parts]
    return lines
